"""A store in the memory of this process: lost when it exits, not shared with other processes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from modelyard.store import StoreSettings

_Key = tuple[str, str]  # scope, key


class MemoryStore:
    """Drops the least recently used entries first. An entry expires `ttl_s` after it was put."""

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries, self._max_bytes, self._ttl, self._clock = max_entries, max_bytes, ttl_s, clock
        self._entries: OrderedDict[_Key, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    async def get(self, scope: str, key: str) -> bytes | None:
        full_key = (scope, key)
        found = self._entries.get(full_key)
        if found is None:
            return None
        value, expires = found
        if expires <= self._clock():
            self._drop(full_key)
            return None
        self._entries.move_to_end(full_key)
        return value

    async def put(self, scope: str, key: str, value: bytes) -> None:
        full_key, size = (scope, key), len(scope) + len(key) + len(value)
        self._drop(full_key)
        if size > self._max_bytes:
            return  # it would evict all other entries and then itself
        self._entries[full_key] = (value, self._clock() + self._ttl)
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

    def _drop(self, full_key: _Key) -> None:
        found = self._entries.pop(full_key, None)
        if found is not None:
            self._bytes -= len(full_key[0]) + len(full_key[1]) + len(found[0])


def create(settings: StoreSettings) -> MemoryStore:
    return MemoryStore(settings.max_entries, settings.max_bytes, settings.ttl_s)
