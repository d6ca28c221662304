"""The queue of one cache: main priority before background, keys round robin, first in first out within a key. Pure.

A key cannot take all slots from keys that use them, too: one is kept for each key that has asked lately (`kept`). Nor
can it fill the queue: the newest waiter of the key with the most waiters makes room for another key's.

The queue is updated in place, not computed from a snapshot, because it changes with every request. Adding, removing and
taking the head cost the same with one waiter and with a thousand.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from modelyard.core.errors import Overloaded
from modelyard.core.request import Priority

_MAX_PASSED = 8  # main requests that may overtake a background request before it is admitted
_SMOOTHING = 0.2  # weight of the newest service time in the average
_MAX_RETRY_S = 300.0
KEEP_S = 5.0  # for how long a slot is kept for a key: people read and agents run tools between two requests


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

    def head(self, may_start: Callable[[W], bool]) -> W | None:
        """The first of the first key whose first may start. Keys that were served lately are at the end, so there are
        few to skip."""
        heads = (next(iter(queue)) for queue in self._queues.values())
        return next((waiter for waiter in heads if may_start(waiter)), None)

    def pop(self, waiter: W) -> None:
        self.remove(waiter)
        if waiter.key in self._queues:
            self._queues.move_to_end(waiter.key)

    def count(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def counts(self) -> Counter[str]:
        """The waiters of each key."""
        return Counter({key: len(queue) for key, queue in self._queues.items()})

    def newest_first(self, key: str) -> Iterator[W]:
        return reversed(self._queues[key]) if key in self._queues else iter(())

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


class KeySlots:
    """Which keys use the slots of a cache, and which have run something in the last `KEEP_S` seconds."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._idle_since: OrderedDict[str, float] = OrderedDict()  # of keys that have run something lately

    def start(self, key: str, slots: int) -> None:
        self._running[key] = self._running.get(key, 0) + slots
        self._idle_since.pop(key, None)

    def end(self, key: str, slots: int, now: float) -> None:
        left = self._running[key] - slots
        if left:
            self._running[key] = left
            return
        del self._running[key]
        self._idle_since[key] = now
        self.kept_until(now)  # a key that does not come back is forgotten

    def has(self, key: str) -> bool:
        return key in self._running

    @property
    def running(self) -> Collection[str]:
        return self._running.keys()

    @property
    def idle(self) -> Collection[str]:
        """Those that have run something lately and run nothing now."""
        return self._idle_since.keys()

    def kept_until(self, now: float) -> float | None:
        """When the next slot is no longer kept; None: none is."""
        while self._idle_since:
            until = next(iter(self._idle_since.values())) + KEEP_S
            if until > now:
                return until
            self._idle_since.popitem(last=False)
        return None


class RequestQueue(Generic[W]):
    """`slots` are those of the cache, by key."""

    def __init__(self, max_waiting: int, max_tokens: int | None = None) -> None:
        self.max_waiting, self.max_tokens = max_waiting, max_tokens
        self.waiting = self.waiting_tokens = 0
        self.service_s: float | None = None
        self.slots = KeySlots()
        self._backlog_until: dict[str, float] = {}  # keys of which several requests have waited lately
        self._main: RoundRobinQueue[W] = RoundRobinQueue()
        self._background: RoundRobinQueue[W] = RoundRobinQueue()
        self._passed = 0

    def __repr__(self) -> str:
        return f"<RequestQueue {self.waiting} waiting>"

    def __iter__(self) -> Iterator[W]:
        return chain(self._main, self._background)

    def add(self, waiter: W, slots: int = 1) -> None:
        """Enqueue or raise Overloaded. `slots` is how many requests run at a time; it scales the retry hint."""
        if (reason := self._is_full(waiter, self.waiting, self.waiting_tokens)) is not None:
            raise self.overloaded(reason, slots)
        self._queue_of(waiter).add(waiter)
        self.waiting += 1
        self.waiting_tokens += waiter.tokens

    def _is_full(self, waiter: W, waiting: int, tokens: int) -> str | None:
        if waiting >= self.max_waiting:
            return f"{waiting} requests are waiting"
        if self.max_tokens is not None and tokens + waiter.tokens > self.max_tokens:
            return f"{tokens} prompt tokens are waiting"
        return None

    def displaced_by(self, waiter: W) -> list[W]:
        """Who must leave a full queue so that this one has room: the newest of the key with the most waiters, as long
        as the key of this one has fewer. Nobody leaves for a request that has no room even then."""
        waiting, tokens, leaving = self.waiting, self.waiting_tokens, list[W]()
        if self._is_full(waiter, waiting, tokens) is None:
            return leaving
        counts = self._main.counts() + self._background.counts()
        newest: dict[str, Iterator[W]] = {}
        while self._is_full(waiter, waiting, tokens) is not None:
            key = max(counts, key=counts.__getitem__, default=waiter.key)
            if counts[key] <= counts[waiter.key] + 1:
                return []
            if key not in newest:
                newest[key] = chain(self._background.newest_first(key), self._main.newest_first(key))
            leaving.append(next(newest[key]))
            counts[key] -= 1
            waiting, tokens = waiting - 1, tokens - leaving[-1].tokens
        return leaving

    def overloaded(self, reason: str, slots: int) -> Overloaded:
        # Without a measured service time, one second per round is assumed.
        rounds = max(1.0, self.waiting / max(1, slots))
        wait = rounds * (1.0 if self.service_s is None else self.service_s)
        retry = min(_MAX_RETRY_S, max(1.0, wait))
        return Overloaded(f"the queue is full: {reason}", retry_after=retry, position=self.waiting + 1)

    def kept(self, key: str, total: int, now: float) -> int:
        """How many of all slots must stay free when a request of this key starts.

        A key with requests that run leaves one for each key that has asked lately and runs nothing now. Without that a
        key with twenty long requests holds every slot whenever another one asks, which then waits for one of them to
        end (measured with four slots: the p99 of short requests was four times as long; twice as long while it left
        only half of the slots).

        Keys with a backlog take turns: they get one slot like any other, and more if one stays free for each key that
        asks one thing at a time. Without that two keys with twenty requests each leave two slots to three such keys.
        """
        if self.slots.kept_until(now) is None:
            return 0
        if self.slots.has(key):
            return min(len(self.slots.idle), total - 1)
        if not self._has_backlog(key, now) or not any(self._has_backlog(other, now) for other in self.slots.running):
            return 0
        modest = (other for other in self.slots.idle if not self._has_backlog(other, now))
        return sum(1 for _ in islice(modest, total))

    def _has_backlog(self, key: str, now: float) -> bool:
        """Several requests wait, or did lately: the last of twenty is none of a key that asks one thing at a time."""
        return self._count(key) > 1 or self._backlog_until.get(key, now) > now

    def release(self, key: str, slots: int, now: float) -> None:
        """A request of this key has ended."""
        if self._count(key) > 1:
            self._backlog_until[key] = now + KEEP_S
        elif not self._has_backlog(key, now):
            self._backlog_until.pop(key, None)
        self.slots.end(key, slots, now)

    def _count(self, key: str) -> int:
        return self._main.count(key) + self._background.count(key)

    def head(self, may_start: Callable[[W], bool] = lambda _: True) -> W | None:
        """The next waiter. Keys that run nothing come first. No other overtakes it, so a request that needs many slots
        cannot starve."""
        first = self._next_queue()
        for queue in (first, self._background if first is self._main else self._main):
            found = queue.head(lambda one: self._has_none(one) and may_start(one)) or queue.head(may_start)
            if found is not None:
                return found
        return None

    def _has_none(self, waiter: W) -> bool:
        return not self.slots.has(waiter.key)

    def pop(self, waiter: W) -> None:
        """A head starts."""
        queue = self._queue_of(waiter)
        self._passed = self._passed + 1 if queue is self._main and self._background else 0
        queue.pop(waiter)
        self._count_removed(waiter)

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
