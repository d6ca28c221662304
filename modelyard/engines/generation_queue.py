"""The bounded queue between an engine and the one reader of a job: what every engine hands out as its Generation.

A list and at most one Future. The engine appends, the reader takes everything that waits. A reader that lags costs no
wake-up a token: neighbouring `Tokens` reach it as one chunk. A reader that stalls is noticed by the engine: `put` says
False once `limit` items wait, and `on_drained` tells when the reader has taken them. A job that is done when it begins
needs no queue: it hands out a `Whole`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Generic, TypeVar, cast

from msgspec import Struct

from modelyard.core.engine import Tokens

T = TypeVar("T")


class GenerationQueue(Generic[T]):
    """Made on the reader's loop. `put`, `put_many` and `close` belong to its thread; the others to any."""

    __slots__ = ("_closed", "_loop", "_on_cancel", "_on_room", "_reader", "_sink", "_waiting", "limit")

    def __init__(
        self,
        *,
        on_cancel: Callable[[], None] | None = None,
        on_drained: Callable[[], None] | None = None,
        limit: int = 1024,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.limit = limit
        self._loop = loop or asyncio.get_running_loop()
        self._waiting: list[T] = []
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self._sink: Callable[[list[T], bool], None] | None = None
        self._on_room = on_drained
        # A list, because `pop` is atomic: two threads that cancel at once still cancel once.
        self._on_cancel = [on_cancel] if on_cancel else []

    def __repr__(self) -> str:
        return f"<GenerationQueue {len(self._waiting)} waiting{', closed' if self._closed else ''}>"

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self.limit

    @property
    def closed(self) -> bool:
        return self._closed

    # --- the engine's side ------------------------------------------------------------------------------------------

    def put(self, item: T) -> bool:
        """Always takes the item; False asks the engine to wait for `on_drained`."""
        if self._closed:
            raise RuntimeError(f"{item!r} was put into a mailbox that is closed")
        self._waiting.append(item)
        if self._reader is not None or self._sink is not None:
            self._wake()
        return len(self._waiting) < self.limit

    def put_many(self, items: Iterable[T], *, last: bool = False) -> bool:
        """Several at once; `last` closes the mailbox behind them."""
        if self._closed:
            raise RuntimeError("items were put into a mailbox that is closed")
        self._waiting.extend(items)
        if last:
            self.close()
        else:
            self._wake()
        return len(self._waiting) < self.limit

    def post_many(self, items: Iterable[T], *, last: bool = False) -> None:
        """`put_many` from another thread, at the price of one wake-up of the loop."""
        self._loop.call_soon_threadsafe(lambda: self.put_many(items, last=last))

    def close(self) -> None:
        """Nothing more will come and nothing is left to cancel; what waits can still be read."""
        self._closed = True
        self._on_cancel.clear()
        self._on_room = None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        elif self._sink is not None:
            self._pour(self._sink)

    # --- the reader's side ------------------------------------------------------------------------------------------

    def __aiter__(self) -> GenerationQueue[T]:
        return self

    async def __anext__(self) -> list[T]:
        """Nothing is taken before it is handed out, so a reader that is cancelled while it waits loses nothing."""
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._reader is not None and not self._reader.done():
                raise RuntimeError("a job has one reader, and another already waits")
            self._reader = reader = self._loop.create_future()
            try:
                await reader
            finally:
                if self._reader is reader:
                    self._reader = None
        items, self._waiting = self._waiting, []
        if len(items) >= self.limit and self._on_room is not None:
            self._on_room()
        return items if len(items) == 1 else merge_tokens(items)

    def forward_to(self, sink: Callable[[list[T], bool], None] | None) -> None:
        """From now on `sink` gets all that comes, at once, and whether it was the last; None: it waits here again.

        For whoever passes items on and needs no task a job to do so. What waits already goes first.
        """
        self._sink = sink
        if sink is not None and (self._waiting or self._closed):
            self._pour(sink)

    def _pour(self, sink: Callable[[list[T], bool], None]) -> None:
        had_no_room = self.full
        items, self._waiting = self._waiting, []
        if self._closed:
            self._sink = None
        sink(items if len(items) < 2 else merge_tokens(items), self._closed)
        if had_no_room and self._on_room is not None:
            self._on_room()

    def cancel(self) -> None:
        try:
            on_cancel = self._on_cancel.pop()
        except IndexError:
            return
        on_cancel()


class Whole(Struct, Generic[T], eq=False):
    """All of a job that was done at once, read like a mailbox that was filled and closed before anybody looked. It has
    nothing to wait for and nothing to cancel: it keeps nothing but its items, which are told as they are."""

    items: list[T]

    def __aiter__(self) -> Whole[T]:
        return self

    async def __anext__(self) -> list[T]:
        items, self.items = self.items, []
        if not items:
            raise StopAsyncIteration
        return items

    def forward_to(self, sink: Callable[[list[T], bool], None] | None) -> None:
        if sink is not None:
            items, self.items = self.items, []
            sink(items, True)

    def cancel(self) -> None:
        pass


def merge_tokens(items: list[T]) -> list[T]:
    """The same items with every run of neighbouring `Tokens` as one."""
    if [*map(type, items)].count(Tokens) < 2 or not _has_neighbours(items):
        return items
    out: list[T] = []
    for alike, group in groupby(items, _likeness):
        run = list(group)
        out += run if alike is None else [cast(T, _one(cast(list[Tokens], run)))]
    return out


def _has_neighbours(items: list[T]) -> bool:
    """Two `Tokens` side by side; grouping costs more than to look."""
    before: type | None = None
    for item in items:
        kind = type(item)
        if kind is Tokens and before is Tokens:
            return True
        before = kind
    return False


def _likeness(item: object) -> bool | None:
    """None: never merged. Chunks with and without logprobs do not mix."""
    return item.logprobs is not None if isinstance(item, Tokens) else None


def _one(run: list[Tokens]) -> Tokens:
    if len(run) == 1:
        return run[0]
    ids = [token for chunk in run for token in chunk.ids]
    logprobs = [each for chunk in run for each in chunk.logprobs or ()]
    return Tokens(ids, logprobs or None)
