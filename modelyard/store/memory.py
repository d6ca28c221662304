"""A store in this process's own memory: gone when it ends, and not shared with other processes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from modelyard.store import StoreSettings

_Name = tuple[str, str]


class MemoryStore:
    """Least recently used entries leave first; an entry's time runs from when it was put."""

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries, self._max_bytes, self._ttl, self._clock = max_entries, max_bytes, ttl_s, clock
        self._entries: OrderedDict[_Name, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    async def get(self, scope: str, key: str) -> bytes | None:
        name = (scope, key)
        found = self._entries.get(name)
        if found is None:
            return None
        value, expires = found
        if expires <= self._clock():
            self._drop(name)
            return None
        self._entries.move_to_end(name)
        return value

    async def put(self, scope: str, key: str, value: bytes) -> None:
        name, size = (scope, key), len(scope) + len(key) + len(value)
        self._drop(name)
        if size > self._max_bytes:
            return  # it would push out everybody else's entries and then itself
        self._entries[name] = (value, self._clock() + self._ttl)
        self._bytes += size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    async def delete(self, scope: str, key: str) -> bool:
        found = self._entries.get((scope, key))
        self._drop((scope, key))
        return found is not None and found[1] > self._clock()

    async def close(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def _drop(self, name: _Name) -> None:
        found = self._entries.pop(name, None)
        if found is not None:
            self._bytes -= len(name[0]) + len(name[1]) + len(found[0])


def create(settings: StoreSettings) -> MemoryStore:
    return MemoryStore(settings.max_entries, settings.max_bytes, settings.ttl_s)
