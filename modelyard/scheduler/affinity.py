"""Choice of the replica for a request: the one that served its session, else its prefix, else the least busy. Pure.

Replicas do not share KV caches, so a conversation is cheap only on the replica that served it before. The memory is
bounded. Replica ids are never reused, so entries of dead replicas are harmless.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

_PREFIX_LENGTHS = (4096, 512, 64)  # hashed prefixes in tokens, longest first
_MAX_EXTRA_LOAD = 2  # a known prefix is preferred up to this many running requests above the least busy replica
_MAX_ENTRIES = 8192


class AffinityCandidate(Protocol):
    """A replica with free slots for the request."""

    id: int

    @property
    def running(self) -> int: ...


C = TypeVar("C", bound=AffinityCandidate)


def prefix_hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Hashes of the prompt's prefixes, longest first. A collision costs a cache hit, never correctness."""
    return tuple(hash(tuple(prompt[:length])) for length in _PREFIX_LENGTHS if len(prompt) >= length)


class ReplicaAffinity:
    """Two LRU maps: session → replica id and prefix hash → replica id."""

    def __init__(self, size: int = _MAX_ENTRIES) -> None:
        self._size = size
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, session: str | None, prefixes: tuple[int, ...], candidates: Sequence[C]) -> C:
        """`candidates` must not be empty."""
        least_busy = min(candidates, key=lambda replica: (replica.running, replica.id))
        by_id = {replica.id: replica for replica in candidates}
        if session is not None and (known := by_id.get(self._sessions.get(session, 0))) is not None:
            return known
        for prefix in prefixes:
            known = by_id.get(self._prefixes.get(prefix, 0))
            if known is not None and known.running <= least_busy.running + _MAX_EXTRA_LOAD:
                return known
        return least_busy

    def record(self, session: str | None, prefixes: tuple[int, ...], replica: int) -> None:
        if session is not None:
            self._put(self._sessions, session, replica)
        for prefix in prefixes:
            self._put(self._prefixes, prefix, replica)

    def _put(self, entries: OrderedDict[Hashable, int], key: Hashable, replica: int) -> None:
        entries[key] = replica
        entries.move_to_end(key)
        if len(entries) > self._size:
            entries.popitem(last=False)
