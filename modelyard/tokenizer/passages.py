"""Short text passage by passage: what stands between two separators is remembered, and only what is new is read.

What programs ask again and again differs in a name or a number: one clause of it is new. Sentences are looked up first,
and only one that is new is cut into clauses. What has something new in it was never met before, and is remembered when
it comes again: of a sentence with an order's number, only the clauses are.
"""

from __future__ import annotations

from collections.abc import Callable

_MAX_HELD = 1 << 20  # characters
Read = Callable[[str], list[int] | None]  # None: it cannot


class Uncut(Exception):
    """The text cannot be cut here, or not be read at all."""


class Passages:
    """A separator's last character is the space that the next passage begins with. Keys have neither, so there is a
    memory for each place: before the first there is no space, behind the last no end. `finer` are the passages that
    `read` cuts one into. The finest count what they learned: a text that adds to it was never met before.

    Safe in threads: a race only learns the same passage twice.
    """

    def __init__(self, separator: str, read: Read, finer: Passages | None = None) -> None:
        self._separator, self._end, self._read, self._finest = separator, separator[:-1], read, finer or self
        self._first: dict[str, list[int]] = {}
        self._inner: dict[str, list[int]] = {}
        self._last: dict[str, list[int]] = {}
        self._held = 0
        self.learned = 0

    def encode(self, text: str) -> list[int] | None:
        passages = text.split(self._separator)
        last = passages.pop()
        if not passages:
            return self._read(text)
        first = passages.pop(0)
        ids = (self._first.get(first) or self._learn(self._first, first, first + self._end)).copy()
        for inner in passages:
            ids += self._inner.get(inner) or self._learn(self._inner, inner, f" {inner}{self._end}")
        ids += self._last.get(last) or self._learn(self._last, last, f" {last}")
        return ids

    def _learn(self, memory: dict[str, list[int]], key: str, text: str) -> list[int]:
        if memory is not self._first and not key[:1].strip():
            raise Uncut  # the space is not alone, and may belong to what follows
        known = self._finest.learned
        ids = self._read(text)
        if ids is None:
            raise Uncut
        if self._finest.learned == known:
            memory[key] = ids
            self._held += len(key)
            if self._held > _MAX_HELD:
                self._forget()
        if self._finest is self:
            self.learned += 1
        return ids

    def _forget(self) -> None:
        for memory in (self._first, self._inner, self._last):
            memory.clear()
        self._held = 0
