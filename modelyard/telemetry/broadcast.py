"""Broadcast of model state changes to any number of subscribers. Bounded: a slow subscriber loses the oldest ones."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakSet

from msgspec.structs import replace

from modelyard.core.pool import ModelStateChange

_MAX_QUEUED = 256


class ModelChangeBroadcast:
    """Holds its subscriptions weakly: one that is no longer referenced is dropped."""

    def __init__(self) -> None:
        self._subscriptions: WeakSet[ModelChangeSubscription] = WeakSet()
        self._closed = False

    def subscribe(self, max_queued: int = _MAX_QUEUED) -> ModelChangeSubscription:
        subscription = ModelChangeSubscription(max_queued)
        self._subscriptions.add(subscription)
        if self._closed:
            subscription.close()
        return subscription

    def publish(self, change: ModelStateChange) -> None:
        for subscription in list(self._subscriptions):
            subscription.put(change)

    def close(self) -> None:
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.close()


class ModelChangeSubscription:
    """An async iterator of changes. `missed` of a change counts those that were dropped before it."""

    def __init__(self, max_queued: int) -> None:
        self._queue: deque[ModelStateChange] = deque()
        self._max_queued, self._missed, self._closed = max_queued, 0, False
        self._arrived = asyncio.Event()

    def put(self, change: ModelStateChange) -> None:
        if len(self._queue) >= self._max_queued:
            self._queue.popleft()
            self._missed += 1
        self._queue.append(change)
        self._arrived.set()

    def close(self) -> None:
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> ModelChangeSubscription:
        return self

    async def __anext__(self) -> ModelStateChange:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        missed, self._missed = self._missed, 0
        change = self._queue.popleft()
        return replace(change, missed=missed) if missed else change
