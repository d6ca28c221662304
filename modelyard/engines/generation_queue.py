"""How chunks travel from an engine to the reader of a generation.

`GenerationQueue` is what every engine returns as its `Generation`. It holds a list and at most one Future. The engine
appends; the reader takes everything at once. A slow reader costs no wake-up per token: it gets neighbouring `Tokens` as
one chunk. If the reader stalls, `put` returns False once `limit` items wait, and `on_drained` is called when the reader
has taken them.

`TokenDispatch` hands chunks from an engine's thread to the event loop, once per step and when it costs the least.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelyard.core.engine import Chunk, Tokens

if TYPE_CHECKING:
    from modelyard.engines.in_process import InProcessJob

T = TypeVar("T")

Sink = Callable[[list[T], bool], None]  # (items, whether they are the last)


class GenerationQueue(Generic[T]):
    """Create it on the reader's event loop. `cancel` may be called from any thread, everything else on the loop."""

    __slots__ = ("_closed", "_items", "_loop", "_on_cancel", "_on_drained", "_reader", "_sink", "limit")

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
        self._items: list[T] = []
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self._sink: Sink[T] | None = None
        self._on_drained = on_drained
        # A list, because `pop` is atomic: if two threads cancel at once, the callback still runs once.
        self._on_cancel = [on_cancel] if on_cancel else []

    def __repr__(self) -> str:
        return f"<GenerationQueue {len(self._items)} waiting{', closed' if self._closed else ''}>"

    @property
    def full(self) -> bool:
        return len(self._items) >= self.limit

    @property
    def closed(self) -> bool:
        return self._closed

    # --- the engine's side ------------------------------------------------------------------------------------------

    def put(self, item: T) -> bool:
        """Always takes the item; False asks the engine to wait for `on_drained`."""
        if self._closed:
            raise RuntimeError(f"{item!r} was put into a closed queue")
        self._items.append(item)
        if self._reader is not None or self._sink is not None:
            self._wake()
        return len(self._items) < self.limit

    def put_many(self, items: Iterable[T], *, last: bool = False) -> bool:
        """Puts several items; `last` closes the queue behind them."""
        if self._closed:
            raise RuntimeError("items were put into a closed queue")
        self._items.extend(items)
        if last:
            self.close()
        elif self._reader is not None or self._sink is not None:
            self._wake()
        return len(self._items) < self.limit

    def close(self) -> None:
        """No more items follow, and there is nothing to cancel. Waiting items can still be read."""
        self._closed = True
        self._on_cancel.clear()
        self._on_drained = None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        elif self._sink is not None:
            self._forward(self._sink)

    # --- the reader's side ------------------------------------------------------------------------------------------

    def __aiter__(self) -> GenerationQueue[T]:
        return self

    async def __anext__(self) -> list[T]:
        """Items leave the queue only when they are returned, so cancelling a waiting reader loses nothing."""
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            if self._reader is not None and not self._reader.done():
                raise RuntimeError("a generation has one reader, and another one is waiting")
            self._reader = reader = self._loop.create_future()
            try:
                await reader
            finally:
                if self._reader is reader:
                    self._reader = None
        items, self._items = self._items, []
        if len(items) >= self.limit and self._on_drained is not None:
            self._on_drained()
        return items if len(items) == 1 else merge_tokens(items)

    def forward_to(self, sink: Sink[T] | None) -> None:
        """Passes every item to `sink` at once, without a reader task; waiting items first. None stops forwarding."""
        self._sink = sink
        if sink is not None and (self._items or self._closed):
            self._forward(sink)

    def _forward(self, sink: Sink[T]) -> None:
        was_full = self.full
        items, self._items = self._items, []
        if self._closed:
            self._sink = None
        sink(items if len(items) < 2 else merge_tokens(items), self._closed)
        if was_full and self._on_drained is not None:
            self._on_drained()

    def cancel(self) -> None:
        try:
            on_cancel = self._on_cancel.pop()
        except IndexError:
            return
        on_cancel()


# --- neighbouring tokens ----------------------------------------------------------------------------------------------


def merge_tokens(items: list[T]) -> list[T]:
    """The same items with every run of neighbouring `Tokens` as one. Chunks with and without logprobs do not mix."""
    merged: list[Any] = []
    last: Tokens | None = None  # the last item, if it has tokens
    grown: Tokens | None = None  # the last chunk that was created here: only its lists may grow
    for item in items:
        if not isinstance(item, Tokens):
            last = None
            merged.append(item)
        elif last is None or (last.logprobs is None) is not (item.logprobs is None):
            last = item
            merged.append(item)
        else:
            if last is not grown:
                last = grown = Tokens([*last.ids], None if last.logprobs is None else [*last.logprobs])
                merged[-1] = last
            last.ids.extend(item.ids)
            if last.logprobs is not None:
                last.logprobs.extend(item.logprobs or ())
    return merged


# --- from an engine's thread to the event loop ------------------------------------------------------------------------


JobChunks = tuple["InProcessJob", Sequence[Chunk], bool]  # the last item: these are the job's last chunks
BatchTokens = tuple[Sequence["InProcessJob"], Sequence[int]]  # one token for each job


class TokenDispatch:
    """Belongs to one thread. `loop` is the event loop that reads the jobs' queues.

    A step's tokens are known when it ends, and the next step starts at once. If the event loop woke then, it would take
    the GIL while the thread launches GPU work, and both would lose. So tokens may wait here until the thread is about
    to wait for the GPU without the GIL. First tokens, ends and all else that a client waits for are delivered at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[JobChunks | BatchTokens] = []
        self._urgent = self._waited = False

    def put(self, job: InProcessJob, chunks: Sequence[Chunk], last: bool = False, *, urgent: bool = True) -> None:
        """Chunks that are not `urgent` may wait until the thread's next GPU wait, if one follows soon."""
        self._pending.append((job, chunks, last))
        self._urgent = self._urgent or urgent or last

    def put_batch(self, jobs: Sequence[InProcessJob], tokens: Sequence[int]) -> None:
        """One token for each job. The event loop creates the chunks: the thread's time is more valuable."""
        self._pending.append((jobs, tokens))
        self._urgent = True

    def flush(self) -> None:
        self._urgent = False
        if self._pending:
            pending, self._pending = self._pending, []
            self._loop.call_soon_threadsafe(deliver, pending)

    def before_gpu_wait(self) -> None:
        """The thread is about to wait without the GIL."""
        self._waited = True
        self.flush()

    def end_step(self, next_is_similar: bool) -> None:
        """`next_is_similar`: a step of the same kind follows at once. If this step did not wait for the GPU, the next
        may not either, so nothing is held back for it."""
        waited, self._waited = self._waited, False
        if self._urgent or not (next_is_similar and waited):
            self.flush()


def deliver(pending: list[JobChunks | BatchTokens]) -> None:
    """On the event loop. Jobs that have ended meanwhile are skipped."""
    for item in pending:
        if len(item) == 3:
            job, chunks, last = item
            if not job.queue.closed:
                job.queue.put_many(chunks, last=last)
        else:
            for job, token in zip(*item, strict=True):
                if not job.queue.closed:
                    job.queue.put(Tokens([token]))
