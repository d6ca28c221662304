"""Which prompts the fake engine still «has in its KV»: real longest common prefixes, so cached counts look real."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

from modelyard.core.engine import Accepted

_NEAR = 2  # recent sequences that a prompt without a session is compared with
_STRIDE = 16

_NOTHING, _EVICTED = Accepted(), Accepted(evicted=True)  # values: the same for every prompt that finds nothing

Key = str | int  # a session's name, or the number of a sequence without one
Held = tuple[Key, Sequence[int], Sequence[int]]  # the prompt and what was said, apart: to join them would copy both


class Sequences:
    """One cache's sequences, the least recently used first."""

    def __init__(self, parallel: int) -> None:
        self._parallel = max(1, parallel)
        self._held: OrderedDict[Key, Held] = OrderedDict()
        self._newest: deque[Held] | None = None  # the last `_NEAR` of them, newest first; None: to be looked up
        self._unnamed = 0
        self._differed = 0  # where two conversations parted last: prompts that are alike often part there again

    @property
    def count(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        return sum(len(prompt) + len(said) for _, prompt, said in self._held.values())

    def take(self, ids: Sequence[int], session: str | None) -> tuple[Key, Accepted]:
        """The sequence that this prompt goes on in (it is taken out until `keep`), and how much of it holds.
        `divergence` is None where there was nothing to diverge from, or no need to."""
        held = None if session is None else self._held.get(session)
        shared = self._nearest(ids) if held is None else (held, _shared(held, ids))
        if shared is None:
            self._unnamed += 1
            return session or self._unnamed, self._make_room()
        (key, prompt, said), length = shared
        del self._held[key]
        self._newest = None
        cached = min(length, len(ids) - 1)  # the last token is always evaluated: something must be sampled from
        divergence = length if (prompt or said) and length < len(ids) else None
        return session or key, Accepted(max(0, cached), divergence)

    def keep(self, key: Key, prompt: Sequence[int], said: Sequence[int] = ()) -> None:
        """Both lists are held as they are: nobody changes them any more."""
        if key in self._held:
            del self._held[key]
            self._newest = None
        self._held[key] = held = (key, prompt, said)
        if self._newest is not None:
            self._newest.appendleft(held)
        while len(self._held) > self._parallel:
            self._evict()

    def copy(self) -> Sequences:
        twin = Sequences(self._parallel)
        twin._held, twin._unnamed = self._held.copy(), self._unnamed
        return twin

    def clear(self) -> None:
        self._held.clear()
        self._newest = None

    def _make_room(self) -> Accepted:
        if len(self._held) < self._parallel:
            return _NOTHING
        self._evict()
        return _EVICTED

    def _evict(self) -> None:
        self._held.popitem(last=False)
        if len(self._held) < _NEAR:
            self._newest = None

    def _nearest(self, ids: Sequence[int]) -> tuple[Held, int] | None:
        """The sequence, and how much of it the prompt shares. Less than half of a long one in common is another
        conversation: it keeps its place."""
        best, at = None, self._differed
        if self._newest is None:
            self._newest = deque(islice(reversed(self._held.values()), _NEAR), _NEAR)
        for held in self._newest:
            prompt = held[1]
            if at * 2 < len(prompt) and (at >= len(ids) or prompt[at] != ids[at]):
                continue  # nearly always, by one token
            shared = _shared(held, ids)
            if shared * 2 < len(prompt) + len(held[2]):
                self._differed = at = shared
            elif shared > (best[1] if best else 0):
                best = held, shared
        return best


def _shared(held: Held, ids: Sequence[int]) -> int:
    _, prompt, said = held
    shared = common_prefix(prompt, ids)
    return shared if shared < len(prompt) else shared + common_prefix(said, ids[shared:])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Strides are compared in C and double while they are equal; the short one that differs goes token by token."""
    end, at, stride = min(len(a), len(b)), 0, _STRIDE
    while at < end:
        to = at + stride if at + stride < end else end
        if a[at:to] == b[at:to]:
            at, stride = to, stride * 2
        elif stride > _STRIDE:
            stride = _STRIDE
        else:
            while a[at] == b[at]:
                at += 1
            return at
    return end
