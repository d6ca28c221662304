"""Several replies at once (`n` > 1, or several legacy prompts) on one lease, read as one stream.

The lease may have fewer sequences than there are choices; then they take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from modelyard.core.engine import Engine
from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import CacheReuse
from modelyard.core.pool import Lease, Ticket
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.stream import ChoiceStream, EventBatch


class MultiChoiceStream:
    """A `Stream` of several others, which are read at the same time."""

    def __init__(
        self,
        prepared: PreparedRequest,
        ticket: Ticket,
        open_choice: Callable[[int, Ticket], ChoiceStream],
        on_close: Callable[[MultiChoiceStream], None],
    ) -> None:
        self.prepared = prepared
        self._shared = _SharedLease(ticket, prepared.choices)
        self._on_close = on_close
        self.streams = [open_choice(i, _LeaseShare(self._shared)) for i in range(prepared.choices)]
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: deque[EventBatch] = deque()
        self._wake = asyncio.Event()
        self._running = prepared.choices

    @property
    def reuse(self) -> CacheReuse | None:
        return self.streams[0].reuse

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.streams[0].ignored

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        if not self._tasks:
            self._tasks = [self._start(stream) for stream in self.streams]
        while not self._ready:
            if not self._running:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()

    def _start(self, stream: ChoiceStream) -> asyncio.Task[None]:
        """The end is a callback: a task that is cancelled before it starts runs no `finally`."""
        task = asyncio.create_task(self._pump(stream))
        task.add_done_callback(lambda _: self._ended(stream))
        return task

    async def _pump(self, stream: ChoiceStream) -> None:
        async for batch in stream:
            self._ready.append(batch)
            self._wake.set()

    def _ended(self, stream: ChoiceStream) -> None:
        stream.close()
        self._running -= 1
        self._wake.set()

    def cancel(self, reason: ModelyardError | None = None) -> None:
        for stream in self.streams:
            stream.cancel(reason)

    def close(self) -> None:
        self._on_close(self)
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            self._shared.ticket.cancel()


class _SharedLease:
    """One lease for all choices; released with the last of them."""

    def __init__(self, ticket: Ticket, choices: int) -> None:
        self.ticket, self._remaining = ticket, choices
        self._sequences: asyncio.Semaphore | None = None

    async def acquire(self) -> Lease:
        lease = await self.ticket.lease()
        if self._sequences is None:
            self._sequences = asyncio.Semaphore(lease.weight)
        await self._sequences.acquire()
        return lease

    def free_sequence(self) -> None:
        if self._sequences is not None:
            self._sequences.release()

    def leave(self) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            self.ticket.cancel()


class _LeaseShare:
    """One choice's view of the shared lease: both its Ticket and its Lease."""

    def __init__(self, shared: _SharedLease) -> None:
        self._shared = shared
        self._lease: Lease | None = None
        self._over = False
        self.waited = 0.0
        self.weight = 1

    @property
    def granted(self) -> bool:
        return self._shared.ticket.granted

    @property
    def position(self) -> int:
        return self._shared.ticket.position

    @property
    def engine(self) -> Engine:
        if self._lease is None:
            raise Cancelled("the lease was not acquired")
        return self._lease.engine

    @property
    def cache(self) -> str:
        return self._lease.cache if self._lease else ""

    def on_revoke(self, end: Callable[[ModelyardError], None]) -> None:
        if self._lease is not None:
            self._lease.on_revoke(end)

    def spend(self, tokens: int) -> None:
        if self._lease is not None:
            self._lease.spend(tokens)

    async def lease(self) -> Lease:
        lease = await self._shared.acquire()
        if self._over:  # cancelled while it waited
            self._shared.free_sequence()
            raise Cancelled("the request was cancelled while it waited")
        self._lease, self.waited = lease, lease.waited
        return self

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            if self._lease is not None:
                self._shared.free_sequence()
            self._shared.leave()

    release = cancel
