"""A place that a gateway has asked the scheduler for: a ticket while it waits, a lease while it runs."""

from __future__ import annotations

import asyncio
from typing import Protocol

from modelyard.core.engine import Engine
from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.lease import Lease, LeaseRequest, RevocableLease
from modelyard.workers.packing import pack_ids
from modelyard.workers.scheduling import Asked

_BEGINNING = 4096  # tokens of a prompt by which replicas are told apart


class Owner(Protocol):
    def left(self, place: RemotePlace) -> None:
        """It is given back, or given up."""
        ...


class RemotePlace(RevocableLease, eq=False):
    _owner: Owner
    id: int
    asked: Asked
    _future: asyncio.Future[None]
    weight: int
    waited: float = 0.0
    position: int = 0
    spent: int = 0
    over: bool = False
    found: Engine | None = None
    engine_id: str = ""

    # --- a ticket ---------------------------------------------------------------------------------------------------

    @property
    def granted(self) -> bool:
        return self.found is not None

    @property
    def waits(self) -> bool:
        return self.found is None and not self.over

    def grant(self, engine: Engine, engine_id: str, weight: int, waited: float) -> None:
        self.found, self.engine_id, self.weight, self.waited, self.position = engine, engine_id, weight, waited, 0
        if not self._future.done():
            self._future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        self.over, self.position = True, 0
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it seen: the client may have left before reading it

    async def lease(self) -> Lease:
        if self.found is None or self.over:
            await asyncio.shield(self._future)
        return self

    def cancel(self) -> None:
        if not self.over:
            self.over = True
            self._revokers = ()
            self._owner.left(self)
            if self.found is None:
                self.refuse(_given_up())

    # --- a lease ----------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self.found is None:
            raise _given_up()
        return self.found

    @property
    def cache(self) -> str:
        return self.asked.cache

    def spend(self, tokens: int) -> None:
        """Told when the place goes back."""
        self.spent += tokens

    release = cancel


def asked_of(demand: LeaseRequest, several: bool) -> Asked:
    """A demand as it travels. The prompt's beginning goes along where `several` replicas may know it."""
    return Asked(
        model=demand.model,
        cache=demand.cache,
        tokens=demand.tokens,
        weight=demand.weight,
        key=demand.key,
        session=demand.session,
        priority=demand.priority,
        deadline=demand.deadline,
        trace=demand.trace,
        prompt=pack_ids(demand.prompt[:_BEGINNING]) if several else b"",
        is_retry=demand.is_retry,
    )


def _given_up() -> Cancelled:
    return Cancelled("the request was given up while it waited")
