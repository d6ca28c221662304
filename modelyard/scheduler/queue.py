"""The queue of one cache: main priority before background, keys round robin, first in first out within a key. Pure.

The queue is updated in place, not computed from a snapshot, because it changes with every request. Adding, removing and
taking the head cost the same with one waiter and with a thousand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

from modelyard.core.errors import Overloaded
from modelyard.core.request import Priority

_MAX_PASSED = 8  # main requests that may overtake a background request before it is admitted
_SMOOTHING = 0.2  # weight of the newest service time in the average
_MAX_RETRY_S = 300.0


class Queueable(Protocol):
    """A queue entry. `weight` counts slots, `tokens` the prompt's tokens."""

    @property
    def key(self) -> str: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def since(self) -> float: ...
    @property
    def weight(self) -> int: ...
    @property
    def tokens(self) -> int: ...


W = TypeVar("W", bound=Queueable)


class RoundRobinQueue(Generic[W]):
    """One FIFO per key. The keys take turns, so a key with a hundred requests does not block the others."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[W, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[W]:
        return chain.from_iterable(self._queues.values())

    def add(self, waiter: W) -> None:
        self._queues.setdefault(waiter.key, OrderedDict())[waiter] = None

    def head(self) -> W:
        return next(iter(next(iter(self._queues.values()))))

    def pop(self) -> W:
        key, queue = next(iter(self._queues.items()))
        waiter, _ = queue.popitem(last=False)
        if queue:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]
        return waiter

    def remove(self, waiter: W) -> None:
        queue = self._queues[waiter.key]
        del queue[waiter]
        if not queue:
            del self._queues[waiter.key]

    def oldest(self) -> float | None:
        """The earliest `since`; the head of each key is the oldest of that key."""
        return min((next(iter(queue)).since for queue in self._queues.values()), default=None)

    def count_ahead(self, waiter: W) -> int:
        """How many waiters are served before this one if nothing changes."""
        rank = next(i for i, each in enumerate(self._queues[waiter.key]) if each is waiter)
        count, is_earlier = rank, True
        for key, queue in self._queues.items():
            if key == waiter.key:
                is_earlier = False
            else:
                count += min(len(queue), rank + is_earlier)
        return count


class RequestQueue(Generic[W]):
    def __init__(self, max_waiting: int, max_tokens: int | None = None) -> None:
        self.max_waiting, self.max_tokens = max_waiting, max_tokens
        self.waiting = self.waiting_tokens = 0
        self.service_s: float | None = None
        self._main: RoundRobinQueue[W] = RoundRobinQueue()
        self._background: RoundRobinQueue[W] = RoundRobinQueue()
        self._passed = 0

    def __repr__(self) -> str:
        return f"<RequestQueue {self.waiting} waiting>"

    def __iter__(self) -> Iterator[W]:
        return chain(self._main, self._background)

    def add(self, waiter: W, slots: int = 1) -> None:
        """Enqueue or raise Overloaded. `slots` is how many requests run at a time; it scales the retry hint."""
        if self.waiting >= self.max_waiting:
            raise self._overloaded(f"{self.waiting} requests are waiting", slots)
        if self.max_tokens is not None and self.waiting_tokens + waiter.tokens > self.max_tokens:
            raise self._overloaded(f"{self.waiting_tokens} prompt tokens are waiting", slots)
        self._queue_of(waiter).add(waiter)
        self.waiting += 1
        self.waiting_tokens += waiter.tokens

    def _overloaded(self, reason: str, slots: int) -> Overloaded:
        # Without a measured service time, one second per round is assumed.
        rounds = max(1.0, self.waiting / max(1, slots))
        wait = rounds * (1.0 if self.service_s is None else self.service_s)
        retry = min(_MAX_RETRY_S, max(1.0, wait))
        return Overloaded(f"the queue is full: {reason}", retry_after=retry, position=self.waiting + 1)

    def head(self) -> W | None:
        """The next waiter. Nothing overtakes it, so a request that needs many slots cannot starve."""
        return self._next_queue().head() if self.waiting else None

    def pop(self) -> W:
        queue = self._next_queue()
        self._passed = self._passed + 1 if queue is self._main and self._background else 0
        waiter = queue.pop()
        self._count_removed(waiter)
        return waiter

    def remove(self, waiter: W) -> None:
        self._queue_of(waiter).remove(waiter)
        self._count_removed(waiter)

    def clear(self) -> list[W]:
        removed = list(self)
        self._main, self._background = RoundRobinQueue(), RoundRobinQueue()
        self.waiting = self.waiting_tokens = self._passed = 0
        return removed

    def position(self, waiter: W) -> int:
        """Counted from 1. A background waiter may be admitted earlier than its position says."""
        before = 0 if waiter.priority == "main" else sum(1 for _ in self._main)
        return before + self._queue_of(waiter).count_ahead(waiter) + 1

    def oldest(self) -> float | None:
        times = (queue.oldest() for queue in (self._main, self._background))
        return min((since for since in times if since is not None), default=None)

    def record_service(self, seconds: float) -> None:
        old = self.service_s
        self.service_s = seconds if old is None else old + _SMOOTHING * (seconds - old)

    def _next_queue(self) -> RoundRobinQueue[W]:
        if self._background and (self._passed >= _MAX_PASSED or not self._main):
            return self._background
        return self._main

    def _queue_of(self, waiter: W) -> RoundRobinQueue[W]:
        return self._main if waiter.priority == "main" else self._background

    def _count_removed(self, waiter: W) -> None:
        self.waiting -= 1
        self.waiting_tokens -= waiter.tokens
