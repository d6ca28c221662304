"""Changes of a pool in another process, for one reader here."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from modelyard.core.pool import Change

_REMEMBERED = 256  # changes that a reader may lag behind


class Feed:
    """One reader's changes; what falls out while it lags is counted in the next one."""

    def __init__(self, among: set[Feed]) -> None:
        self._among = among
        self._changes: deque[Change] = deque(maxlen=_REMEMBERED)
        self._missed, self._over = 0, False
        self._arrived = asyncio.Event()
        among.add(self)

    def put(self, change: Change) -> None:
        self._missed += len(self._changes) == _REMEMBERED
        self._changes.append(change)
        self._arrived.set()

    def end(self) -> None:
        self._over = True
        self._arrived.set()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        missed, self._missed = self._missed, 0
        change = self._changes.popleft()
        return msgspec.structs.replace(change, missed=missed) if missed else change

    async def aclose(self) -> None:
        self._among.discard(self)
