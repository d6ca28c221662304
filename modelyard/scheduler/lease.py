"""One request's place: a ticket while it waits, a lease while it runs."""

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
    """Who gave the place, and takes it back."""

    def released(self, place: SlotLease) -> None: ...
    def left(self, place: SlotLease) -> None:
        """It waited, and does so no more; it has not been told why yet."""
        ...

    def spent(self, allowance: KeyRateLimiter, tokens: int) -> None: ...


class SlotLease(RevocableLease, eq=False):
    """Both seams in one object: a request makes one of these and nothing else. Whoever finds a free place is granted
    one from the start."""

    _owner: LeaseOwner
    model: PooledModel
    lane: RequestQueue[SlotLease]
    demand: LeaseRequest
    weight: int
    since: float
    replica: Replica | None = None
    engine: Any = None  # the replica's when it was granted; nobody has a lease before
    granted: bool = False
    waited: float = 0.0
    over: bool = False
    allowance: KeyRateLimiter | None = None
    timer: TimerHandle | None = None
    _future: asyncio.Future[None] | None = None

    # --- what a lane wants to know ---------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        return self.demand.key

    @property
    def priority(self) -> Priority:
        return self.demand.priority

    @property
    def tokens(self) -> int:
        return self.demand.tokens

    # --- a ticket --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return self.replica is None and not self.over

    @property
    def position(self) -> int:
        return self.lane.position(self) if self.waits else 0

    def wait(self) -> None:
        self._future = asyncio.get_running_loop().create_future()

    def grant(self, replica: Replica, now: float) -> None:
        """It waited; now it runs."""
        self.replica, self.engine, self.granted = replica, replica.engine, True
        self.waited = now - self.since
        self._end_wait()
        if self._future is not None:
            self._future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        """It must have left its lane."""
        self.over = True
        self._end_wait()
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it seen: the client may have left before reading it

    def _end_wait(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def lease(self) -> Lease:
        if self.replica is None and self._future is not None:
            await asyncio.shield(self._future)
        if self.replica is None:
            raise _given_up()
        return self

    def cancel(self) -> None:
        if self.replica is not None:
            self.release()
        elif not self.over:
            self._owner.left(self)
            self.refuse(_given_up())

    # --- a lease ---------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> str:
        return self.demand.cache

    def spend(self, tokens: int) -> None:
        if self.allowance is not None:
            self._owner.spent(self.allowance, tokens)

    def release(self) -> None:
        if not self.over and self.replica is not None:
            self.over = True
            self._revokers = ()
            self._owner.released(self)


def _given_up() -> Cancelled:
    return Cancelled("the request was given up while it waited")
