"""What happens to models, told to everybody who listens; bounded, so that one who lags costs the pool nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakSet

from msgspec.structs import replace

from modelyard.core.pool import ModelStateChange

_KEPT = 256


class ModelChangeBroadcast:
    """The side that tells. Listeners that nobody holds any more are forgotten."""

    def __init__(self) -> None:
        self._listeners: WeakSet[ModelChangeSubscription] = WeakSet()
        self._over = False

    def listen(self, kept: int = _KEPT) -> ModelChangeSubscription:
        listener = ModelChangeSubscription(kept)
        self._listeners.add(listener)
        if self._over:
            listener.end()
        return listener

    def tell(self, change: ModelStateChange) -> None:
        for listener in list(self._listeners):
            listener.put(change)

    def end(self) -> None:
        self._over = True
        for listener in list(self._listeners):
            listener.end()


class ModelChangeSubscription:
    """One reader's changes. It reads on where it stopped; what fell out in between is counted in the next one."""

    def __init__(self, kept: int) -> None:
        self._changes: deque[ModelStateChange] = deque()
        self._kept, self._missed, self._over = kept, 0, False
        self._arrived = asyncio.Event()

    def put(self, change: ModelStateChange) -> None:
        if len(self._changes) >= self._kept:
            self._changes.popleft()
            self._missed += 1
        self._changes.append(change)
        self._arrived.set()

    def end(self) -> None:
        self._over = True
        self._arrived.set()

    def __aiter__(self) -> ModelChangeSubscription:
        return self

    async def __anext__(self) -> ModelStateChange:
        while not self._changes:
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        missed, self._missed = self._missed, 0
        change = self._changes.popleft()
        return replace(change, missed=missed) if missed else change
