"""Which replica takes a request: the one that knows its session, else its prefix, else the least busy one. Pure.

Replicas do not share their KV caches, so a conversation is cheap only where it was before. What is remembered is
bounded, and ids of replicas are never used twice: what a dead one knew is simply never found again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

_LENGTHS = (4096, 512, 64)  # tokens of a prompt's beginning that are remembered, longest first
_LEAN = 2  # a known prefix is worth so many more answers at a time than the least busy replica has
_REMEMBERED = 8192


class AffinityCandidate(Protocol):
    """A replica with room for the request."""

    id: int

    @property
    def running(self) -> int: ...


C = TypeVar("C", bound=AffinityCandidate)
K = TypeVar("K")


def prefix_hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Beginnings of the prompt, longest first. A collision costs a prefix hit, never a wrong answer."""
    return tuple(hash(tuple(prompt[:length])) for length in _LENGTHS if len(prompt) >= length)


class _Memory(Generic[K]):
    """The newest so many."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[K, int] = OrderedDict()

    def get(self, key: K) -> int | None:
        return self._known.get(key)

    def put(self, key: K, replica: int) -> None:
        self._known[key] = replica
        self._known.move_to_end(key)
        if len(self._known) > self._size:
            self._known.popitem(last=False)


class ReplicaAffinity:
    def __init__(self, size: int = _REMEMBERED) -> None:
        self._sessions: _Memory[str] = _Memory(size)
        self._prefixes: _Memory[int] = _Memory(size)

    def choose(self, session: str | None, prefix: tuple[int, ...], candidates: Sequence[C]) -> C:
        """At least one must have room."""
        idlest = min(candidates, key=lambda one: (one.running, one.id))
        by_id = {one.id: one for one in candidates}
        if session is not None and (known := by_id.get(self._sessions.get(session) or 0)) is not None:
            return known
        for mark in prefix:
            known = by_id.get(self._prefixes.get(mark) or 0)
            if known is not None and known.running <= idlest.running + _LEAN:
                return known
        return idlest

    def remember(self, session: str | None, prefix: tuple[int, ...], replica: int) -> None:
        if session is not None:
            self._sessions.put(session, replica)
        for mark in prefix:
            self._prefixes.put(mark, replica)
