"""One cache's queue: so many places, first come first served, bounded. Pure: it decides, the scheduler acts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from modelyard.core.errors import Overloaded


class Waiter(Protocol):
    """What stands in a lane: its weight in places and its size in prompt tokens."""

    weight: int
    tokens: int


W = TypeVar("W", bound=Waiter)


class Lane(Generic[W]):
    def __init__(self, places: int, max_waiting: int, max_tokens: int | None = None) -> None:
        self.places = places
        self.free = places
        self.max_waiting, self.max_tokens = max_waiting, max_tokens
        self.waiting: deque[W] = deque()
        self.waiting_tokens = 0

    def __repr__(self) -> str:
        return f"<Lane {self.places - self.free}/{self.places} running, {len(self.waiting)} waiting>"

    def take(self, waiter: W) -> bool:
        """A place at once, if one is free and nobody stands in front."""
        if self.waiting or waiter.weight > self.free:
            return False
        self.free -= waiter.weight
        return True

    def join(self, waiter: W) -> int:
        """The waiter's position in the queue, counted from 1, or Overloaded."""
        if len(self.waiting) >= self.max_waiting:
            raise self._full(f"{len(self.waiting)} requests are waiting")
        if self.max_tokens is not None and self.waiting_tokens + waiter.tokens > self.max_tokens:
            raise self._full(f"{self.waiting_tokens} prompt tokens are waiting")
        self.waiting.append(waiter)
        self.waiting_tokens += waiter.tokens
        return len(self.waiting)

    def _full(self, why: str) -> Overloaded:
        # A queue that is twice as deep as the engine is wide needs about two turns to clear.
        turns = max(1.0, len(self.waiting) / max(1, self.places))
        return Overloaded(f"the queue is full: {why}", retry_after=min(60.0, turns), position=len(self.waiting) + 1)

    def leave(self, waiter: W) -> None:
        self.waiting.remove(waiter)
        self.waiting_tokens -= waiter.tokens

    def release(self, weight: int) -> None:
        self.free += weight

    def admit(self) -> Iterator[W]:
        """Everybody who may start now, in order. The head is never overtaken: a heavy waiter cannot starve."""
        while self.waiting and self.waiting[0].weight <= self.free:
            waiter = self.waiting.popleft()
            self.waiting_tokens -= waiter.tokens
            self.free -= waiter.weight
            yield waiter

    def clear(self) -> list[W]:
        gone = list(self.waiting)
        self.waiting.clear()
        self.waiting_tokens = 0
        return gone
