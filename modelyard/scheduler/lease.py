"""One request in the scheduler: a ticket while it waits, a lease while it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.lease import Lease, LeaseRequest, RevocableLease
from modelyard.core.request import Priority
from modelyard.scheduler.clock import TimerHandle
from modelyard.scheduler.queue import RequestQueue
from modelyard.scheduler.rate_limit import KeyRateLimiter
from modelyard.scheduler.replica import Replica

if TYPE_CHECKING:
    from modelyard.scheduler.pooled_model import PooledModel


class LeaseOwner(Protocol):
    """The scheduler, as a lease sees it."""

    def on_released(self, lease: SlotLease) -> None: ...
    def leave_queue(self, lease: SlotLease) -> None:
        """Remove a waiting lease. The caller refuses it."""
        ...

    def on_tokens_spent(self, limiter: KeyRateLimiter, tokens: int) -> None: ...


class SlotLease(RevocableLease, eq=False):
    """`Ticket` and `Lease` in one object, because one is created per request. Granted at once if a slot is free."""

    _owner: LeaseOwner
    model: PooledModel
    queue: RequestQueue[SlotLease]
    request: LeaseRequest
    weight: int
    since: float
    replica: Replica | None = None
    engine: Any = None  # the replica's engine at the time of the grant
    granted: bool = False
    waited: float = 0.0
    is_finished: bool = False
    rate_limiter: KeyRateLimiter | None = None
    timer: TimerHandle | None = None
    _future: asyncio.Future[None] | None = None

    # --- Queueable -------------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def priority(self) -> Priority:
        return self.request.priority

    @property
    def tokens(self) -> int:
        return self.request.tokens

    # --- Ticket ----------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        return self.replica is None and not self.is_finished

    @property
    def position(self) -> int:
        return self.queue.position(self) if self.is_waiting else 0

    def start_waiting(self) -> None:
        self._future = asyncio.get_running_loop().create_future()

    def grant(self, replica: Replica, now: float) -> None:
        self.replica, self.engine, self.granted = replica, replica.engine, True
        self.waited = now - self.since
        self._cancel_timer()
        if self._future is not None:
            self._future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        """The lease must have left its queue."""
        self.is_finished = True
        self._cancel_timer()
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # mark it retrieved: the client may have disconnected

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def lease(self) -> Lease:
        if self.replica is None and self._future is not None:
            await asyncio.shield(self._future)
        if self.replica is None:
            raise _cancelled()
        return self

    def cancel(self) -> None:
        if self.replica is not None:
            self.release()
        elif not self.is_finished:
            self._owner.leave_queue(self)
            self.refuse(_cancelled())

    # --- Lease -----------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> str:
        return self.request.cache

    def spend(self, tokens: int) -> None:
        if self.rate_limiter is not None:
            self._owner.on_tokens_spent(self.rate_limiter, tokens)

    def release(self) -> None:
        if not self.is_finished and self.replica is not None:
            self.is_finished = True
            self._revokers = ()
            self._owner.on_released(self)


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled while it waited")
