"""Which prompts the fake engine still «has in its KV»: real longest common prefixes, so cached counts look real."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

_NEAR = 2  # recent sequences that a prompt without a session is compared with
_STRIDE = 16


class Match(Struct, frozen=True):
    """`divergence` is None where there was nothing to diverge from, or no need to."""

    cached: int = 0
    divergence: int | None = None
    evicted: bool = False


class Sequences:
    """One cache's sequences, the least recently used first."""

    def __init__(self, parallel: int) -> None:
        self._parallel = max(1, parallel)
        self._held: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._unnamed = 0

    @property
    def count(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        return sum(map(len, self._held.values()))

    def take(self, ids: Sequence[int], session: str | None) -> tuple[str, Match]:
        """The sequence that this prompt goes on in (it is taken out until `keep`), and how much of it holds."""
        key, shared = (session, None) if session in self._held else self._nearest(ids)
        held: Sequence[int] = self._held.pop(key, ()) if key is not None else ()
        evicted = not held and len(self._held) >= self._parallel
        if evicted:
            self._held.popitem(last=False)
        if shared is None:
            shared = common_prefix(held, ids)
        cached = min(shared, len(ids) - 1)  # the last token is always evaluated: something must be sampled from
        divergence = shared if held and shared < len(ids) else None
        return session or key or self._name(), Match(max(0, cached), divergence, evicted)

    def keep(self, key: str, ids: Sequence[int]) -> None:
        self._held.pop(key, None)
        self._held[key] = ids
        while len(self._held) > self._parallel:
            self._held.popitem(last=False)

    def copy(self) -> Sequences:
        twin = Sequences(self._parallel)
        twin._held, twin._unnamed = self._held.copy(), self._unnamed
        return twin

    def clear(self) -> None:
        self._held.clear()

    def _name(self) -> str:
        self._unnamed += 1
        return f"#{self._unnamed}"

    def _nearest(self, ids: Sequence[int]) -> tuple[str | None, int]:
        """The sequence, and how much of it the prompt shares. Less than half of a long one in common is another
        conversation: it keeps its place."""
        best, length = None, 0
        for key, held in islice(reversed(self._held.items()), _NEAR):
            half = len(held) // 2
            last = slice(max(0, half - 1), half)
            if held[last] != ids[last] or held[:half] != ids[:half]:
                continue  # nearly always, by one token
            shared = common_prefix(held, ids)
            if shared > length and shared * 2 >= len(held):
                best, length = key, shared
        return best, length


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Strides are compared in C and double while they are equal; the short one that differs goes token by token."""
    end, at, stride = min(len(a), len(b)), 0, _STRIDE
    while at < end:
        if a[at : min(end, at + stride)] == b[at : min(end, at + stride)]:
            at, stride = min(end, at + stride), stride * 2
        elif stride > _STRIDE:
            stride = _STRIDE
        else:
            return at + next(i for i in range(stride) if a[at + i] != b[at + i])
    return end
