"""Ends a generation's reasoning once its budget is spent, by generating the end of the block."""

from __future__ import annotations

from collections.abc import Callable

from modelyard.core.engine import ReasoningBudget

_MAX_CHARACTER = 4  # bytes


class ReasoningLimit:
    """Reads the output token by token. Markers are compared as text: their tokens depend on the text around them."""

    def __init__(self, budget: ReasoningBudget, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes, self._left = token_bytes, budget.tokens
        self._blocks = [
            ([end.encode() for end in block.ends], block.start.encode(), block.closing) for block in budget.blocks
        ]
        self._open = None if budget.opened is None else self._blocks[budget.opened]
        self._longest = max(len(text) for ends, start, _ in self._blocks for text in (*ends, start))
        self._tail = b""  # the end of the output, in which a marker may have begun
        self._closing: list[int] = []  # what is still to be generated of it, in reverse

    def next_token(self) -> int | None:
        """The token that must come next; None: any. Call it once per token."""
        if not self._closing and self._open is not None and self._left <= 0 and not self._is_inside_character():
            self._closing = list(reversed(self._open[2]))
        return self._closing.pop() if self._closing else None

    def read(self, token: int) -> None:
        """The token was generated."""
        if self._open is not None:
            self._left -= 1
        tail = self._tail + self._token_bytes(token)
        if self._open is not None:
            found = next((end for end in self._open[0] if end in tail), None)
            if found is not None and not self._closing:
                self._open, tail = None, tail.partition(found)[2]
        else:
            found_block = next((block for block in self._blocks if block[1] in tail), None)
            if found_block is not None:
                self._open, tail = found_block, tail.partition(found_block[1])[2]
        self._tail = tail[-max(self._longest, _MAX_CHARACTER) :]

    def _is_inside_character(self) -> bool:
        """Whether the last bytes begin a character that later tokens complete."""
        for back, byte in enumerate(reversed(self._tail[-_MAX_CHARACTER:]), 1):
            if byte < 0x80:
                return False
            if byte >= 0xC0:
                return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        return False
