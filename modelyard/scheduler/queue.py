"""One cache's queue: main before background, keys in turn, first come first served within a key. Pure.

It is kept up to date instead of computed from a snapshot, because it changes at every request: joining, leaving and
taking the head cost the same with one waiter and with a thousand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

from modelyard.core.errors import Overloaded
from modelyard.core.request import Priority

_PASSES = 8  # main requests that may go ahead of one in the background before it is let through
_SMOOTHING = 0.2  # share of the newest answer in the average of service times
_LONGEST_RETRY = 300.0


class Queueable(Protocol):
    """What stands in a lane: whose it is, how urgent, since when, its weight in places, its size in prompt tokens."""

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
    """Keys take turns, so that one with a hundred requests does not stand in front of one with a single one."""

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
        """The first of each key is that key's oldest."""
        return min((next(iter(queue)).since for queue in self._queues.values()), default=None)

    def ahead(self, waiter: W) -> int:
        """How many go before it, if nobody comes or leaves."""
        own = self._queues[waiter.key]
        rank = next(i for i, each in enumerate(own) if each is waiter)
        count, earlier = rank, True
        for key, queue in self._queues.items():
            if key == waiter.key:
                earlier = False
            else:
                count += min(len(queue), rank + earlier)
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
        return f"<Lane {self.waiting} waiting>"

    def __iter__(self) -> Iterator[W]:
        return chain(self._main, self._background)

    def join(self, waiter: W, places: int = 1) -> None:
        """Stand in line, or Overloaded. `places` is how many answers run at a time: it tells when to come back."""
        if self.waiting >= self.max_waiting:
            raise self._full(f"{self.waiting} requests are waiting", places)
        if self.max_tokens is not None and self.waiting_tokens + waiter.tokens > self.max_tokens:
            raise self._full(f"{self.waiting_tokens} prompt tokens are waiting", places)
        self._of(waiter).add(waiter)
        self.waiting += 1
        self.waiting_tokens += waiter.tokens

    def _full(self, why: str, places: int) -> Overloaded:
        # Where nothing was ever served here: a queue twice as deep as the engine is wide takes about two turns.
        turns = max(1.0, self.waiting / max(1, places))
        wait = turns * (1.0 if self.service_s is None else self.service_s)
        retry = min(_LONGEST_RETRY, max(1.0, wait))
        return Overloaded(f"the queue is full: {why}", retry_after=retry, position=self.waiting + 1)

    def head(self) -> W | None:
        """Who is next. Nobody overtakes it, so a heavy one waits for its places and cannot starve."""
        return self._next().head() if self.waiting else None

    def pop(self) -> W:
        turns = self._next()
        self._passed = self._passed + 1 if turns is self._main and self._background else 0
        waiter = turns.pop()
        self._left(waiter)
        return waiter

    def leave(self, waiter: W) -> None:
        self._of(waiter).remove(waiter)
        self._left(waiter)

    def clear(self) -> list[W]:
        gone = list(self)
        self._main, self._background = RoundRobinQueue(), RoundRobinQueue()
        self.waiting = self.waiting_tokens = self._passed = 0
        return gone

    def position(self, waiter: W) -> int:
        """Counted from 1; one in the background may get ahead of that by its turn."""
        before = 0 if waiter.priority == "main" else sum(1 for _ in self._main)
        return before + self._of(waiter).ahead(waiter) + 1

    def oldest(self) -> float | None:
        return min((s for t in (self._main, self._background) if (s := t.oldest()) is not None), default=None)

    def served(self, seconds: float) -> None:
        old = self.service_s
        self.service_s = seconds if old is None else old + _SMOOTHING * (seconds - old)

    def _next(self) -> RoundRobinQueue[W]:
        if self._background and (self._passed >= _PASSES or not self._main):
            return self._background
        return self._main

    def _of(self, waiter: W) -> RoundRobinQueue[W]:
        return self._main if waiter.priority == "main" else self._background

    def _left(self, waiter: W) -> None:
        self.waiting -= 1
        self.waiting_tokens -= waiter.tokens
