"""Several answers at once (`n` > 1, or several legacy prompts) on one lease, read as one stream.

The lease may be narrower than the number of choices: then they take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from modelyard.core.engine import Engine
from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import Event
from modelyard.core.lease import Lease, Ticket
from modelyard.gateway.answer import ChoiceStream, Surroundings
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.telemetry.cache_diagnostics import CacheReuse
from modelyard.telemetry.request_capture import RequestCapture


class MultiChoiceStream:
    """The same reading surface as `Answer`: iterate, cancel, close."""

    def __init__(
        self, job: PreparedRequest, ticket: Ticket, around: Surroundings, entry: RequestCapture | None = None
    ) -> None:
        self.job = job
        share = _Share(ticket, job.choices)
        self._share = share
        self._around = around
        self._answers = [ChoiceStream(job, i, _Part(share), around, entry, retry=False) for i in range(job.choices)]
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: deque[tuple[int, list[Event]]] = deque()
        self._wake = asyncio.Event()
        self._running = job.choices

    @property
    def reuse(self) -> CacheReuse | None:
        return self._answers[0].reuse

    def __aiter__(self) -> MultiChoiceStream:
        return self

    async def __anext__(self) -> tuple[int, list[Event]]:
        if not self._tasks:
            self._tasks = [self._begin(answer) for answer in self._answers]
        while not self._ready:
            if not self._running:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()

    def _begin(self, answer: ChoiceStream) -> asyncio.Task[None]:
        """Its end is a callback: a task that is cancelled before it began would run no `finally`."""
        task = asyncio.create_task(self._pump(answer))
        task.add_done_callback(lambda _: self._ended(answer))
        return task

    async def _pump(self, answer: ChoiceStream) -> None:
        async for batch in answer:
            self._ready.append(batch)
            self._wake.set()

    def _ended(self, answer: ChoiceStream) -> None:
        answer.close()
        self._running -= 1
        self._wake.set()

    def cancel(self, why: ModelyardError | None = None) -> None:
        for answer in self._answers:
            answer.cancel(why)

    def close(self) -> None:
        self._around.left(self)
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            self._share.ticket.cancel()


class _Share:
    """A lease that goes back when its last part has."""

    def __init__(self, ticket: Ticket, parts: int) -> None:
        self.ticket, self._left = ticket, parts
        self._turns: asyncio.Semaphore | None = None

    async def take(self) -> Lease:
        lease = await self.ticket.lease()
        if self._turns is None:
            self._turns = asyncio.Semaphore(lease.weight)
        await self._turns.acquire()
        return lease

    def pass_on(self) -> None:
        """The turn goes to the next in line."""
        if self._turns is not None:
            self._turns.release()

    def leave(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.ticket.cancel()


class _Part:
    """One choice's ticket and lease in the shared one."""

    def __init__(self, share: _Share) -> None:
        self._share = share
        self._lease: Lease | None = None
        self._over = False
        self.waited = 0.0
        self.weight = 1

    @property
    def granted(self) -> bool:
        return self._share.ticket.granted

    @property
    def position(self) -> int:
        return self._share.ticket.position

    @property
    def engine(self) -> Engine:
        if self._lease is None:
            raise Cancelled("the lease was not taken")
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
        lease = await self._share.take()
        if self._over:  # given up while it stood in line
            self._share.pass_on()
            raise Cancelled("the request was given up while it waited")
        self._lease, self.waited = lease, lease.waited
        return self

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            if self._lease is not None:
                self._share.pass_on()
            self._share.leave()

    release = cancel
