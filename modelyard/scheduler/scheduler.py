"""The owner of all scheduling state: which models are up, who runs, who waits.

Everything here happens on the event loop's thread, one call at a time, and no call awaits: a request is granted, queued
or refused before `request` returns. Opening and closing engines runs in `Replica` and comes back as an event. There is
no lock in the package.

A demand meets, in this order:

    1. the scheduler is closed                → Unavailable
    2. unknown model                          → NotFound
    3. stopped, and nobody loads it           → Conflict
    4. failed, or down for longer than timeout → Unavailable
    5. a free place and nobody in front       → lease at once
    6. the queue is full                      → Overloaded
    7. otherwise                              → it waits: for a place, for loading or for a restart
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from modelyard.core.engine import CacheInfo, Capabilities, Engine
from modelyard.core.errors import Cancelled, Conflict, ModelyardError, NotFound, Unavailable
from modelyard.core.lease import Demand, Lease, ModelState, ModelStatus
from modelyard.scheduler.lane import Lane
from modelyard.scheduler.replica import MakeEngine, Replica

log = logging.getLogger(__name__)

_RESTARTS = (0.0, 0.5, 2.0, 5.0)  # seconds before each reopening; after the last the model counts as failed


class Grant:
    """A lease: weight places in one lane of one engine."""

    __slots__ = ("_lane", "_model", "_released", "cache", "engine", "waited", "weight")

    def __init__(self, model: _Model, lane: Lane[Place], place: Place, engine: Engine) -> None:
        self.engine, self.cache, self.weight = engine, place.demand.cache, place.weight
        self.waited = 0.0
        self._model, self._lane, self._released = model, lane, False

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._model.running -= self.weight
            self._lane.release(self.weight)
            self._model.admit(self._lane)


class Place:
    """A ticket: from `request` until it is granted, refused or given back."""

    __slots__ = ("_future", "_grant", "_lane", "_since", "demand", "position", "tokens", "weight")

    def __init__(self, demand: Demand, lane: Lane[Place]) -> None:
        self.demand, self._lane = demand, lane
        self.weight, self.tokens = max(1, min(demand.weight, lane.places)), demand.tokens
        self.position = 0
        self._since = 0.0
        self._grant: Grant | None = None
        self._future: asyncio.Future[None] | None = None

    @property
    def granted(self) -> bool:
        return self._grant is not None

    def wait(self, position: int) -> None:
        self.position, self._since = position, time.monotonic()
        self._future = asyncio.get_running_loop().create_future()

    def grant(self, grant: Grant) -> None:
        self._grant = grant
        if self._future is not None:
            grant.waited = time.monotonic() - self._since
            self._future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it seen: the client may have left before reading it

    async def lease(self) -> Lease:
        if self._grant is None and self._future is not None:
            await asyncio.shield(self._future)
        if self._grant is None:
            raise Cancelled("the request was given up while it waited")
        return self._grant

    def cancel(self) -> None:
        if self._grant is not None:
            self._grant.release()
        elif self._future is not None and not self._future.done():
            self._lane.leave(self)
            self.refuse(Cancelled("the request was given up while it waited"))


class _Model:
    """One model's record. `down_since` is set while its engine is away; None while it is up or was never started."""

    def __init__(self, name: str, lanes: Mapping[str, Lane[Place]]) -> None:
        self.name, self.lanes = name, lanes
        self.state: ModelState = "stopped"
        self.reason, self.doing, self.progress, self.running = "", "", 0.0, 0
        self.engine: Engine | None = None
        self.replica: Replica | None = None
        self.down_since: float | None = None
        self.restarts = 0

    @property
    def living(self) -> Engine | None:
        """The engine, unless it is lost: its jobs hear of that before its replica does, and come back at once."""
        return None if self.engine is None or self.engine.lost.done() else self.engine

    def admit(self, lane: Lane[Place]) -> None:
        if (engine := self.living) is None:
            return
        for place in lane.admit():
            self.running += place.weight
            place.grant(Grant(self, lane, place, engine))

    def refuse_all(self, error: ModelyardError) -> None:
        for lane in self.lanes.values():
            for place in lane.clear():
                place.refuse(error)

    @property
    def status(self) -> ModelStatus:
        waiting = sum(len(lane.waiting) for lane in self.lanes.values())
        able = self.engine.info.capabilities if self.engine else Capabilities()
        return ModelStatus(self.state, self.running, waiting, self.reason, self.doing, self.progress, able)


class Bounds(Struct, frozen=True):
    """How many may wait a cache, how many prompt tokens in all, and how long for a lost engine."""

    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    timeout: float = 30.0


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="shutting_down")


class Scheduler:
    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self._bounds = bounds
        self._models: dict[str, _Model] = {}
        self._closed = False

    def __repr__(self) -> str:
        rows = (
            f"{m.name}: {m.state}, {m.status.running} running, {m.status.waiting} waiting"
            for m in self._models.values()
        )
        return f"<Scheduler [{'; '.join(rows)}]>"

    def add(self, name: str, caches: Mapping[str, CacheInfo], make: MakeEngine) -> None:
        """Make a model known. It stays stopped until `load`."""
        lanes: dict[str, Lane[Place]] = {
            cache: Lane(info.parallel, self._bounds.max_waiting, self._bounds.max_waiting_tokens)
            for cache, info in caches.items()
        }
        model = self._models[name] = _Model(name, MappingProxyType(lanes))
        model.replica = Replica(
            make,
            on_ready=lambda engine: self._ready(model, engine),
            on_failed=lambda error: self._failed(model, error),
            on_lost=lambda error: self._lost(model, error),
            on_progress=lambda done, what: self._progress(model, done, what),
        )

    def load(self, name: str) -> None:
        model = self._models[name]
        if model.replica is not None and model.state in ("stopped", "failed"):
            model.state, model.reason, model.progress = "loading", "", 0.0
            model.replica.start()

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        for model in self._models.values():
            model.refuse_all(_shutting_down())
            model.engine, model.state = None, "stopped"
        await asyncio.gather(*(m.replica.close() for m in self._models.values() if m.replica))

    def request(self, demand: Demand) -> Place:
        if self._closed:
            raise _shutting_down()
        model = self._models.get(demand.model)
        if model is None:
            raise NotFound(f"the scheduler knows no model {demand.model!r}", code="model_not_found")
        self._check_up(model)
        lane = model.lanes[demand.cache]
        place = Place(demand, lane)
        if (engine := model.living) is not None and lane.take(place):
            model.running += place.weight
            place.grant(Grant(model, lane, place, engine))
        else:
            place.wait(lane.join(place))
        return place

    def status(self) -> Mapping[str, ModelStatus]:
        return {name: model.status for name, model in self._models.items()}

    def engine(self, model: str) -> Engine | None:
        return self._models[model].living

    def _check_up(self, model: _Model) -> None:
        if model.state == "stopped":
            load = f"POST /v1/admin/models/{model.name}/load"
            raise Conflict(f"the model {model.name!r} is not loaded; load it with {load}", code="model_not_loaded")
        if model.state == "failed":
            raise Unavailable(f"the model {model.name!r} could not be loaded: {model.reason}", code="model_failed")
        if model.down_since is not None and time.monotonic() - model.down_since > self._bounds.timeout:
            raise Unavailable(f"the engine of {model.name!r} was lost and is not back yet: {model.reason}")

    # --- what comes back from a replica ---------------------------------------------------------------------------

    def _progress(self, model: _Model, done: float, what: str) -> None:
        model.progress, model.doing = done, what

    def _ready(self, model: _Model, engine: Engine) -> None:
        log.info("the model %s is ready", model.name)
        model.state, model.reason, model.doing, model.progress = "ready", "", "", 1.0
        model.engine, model.down_since, model.restarts = engine, None, 0
        for lane in model.lanes.values():
            model.admit(lane)

    def _failed(self, model: _Model, error: ModelyardError) -> None:
        if model.down_since is not None and model.restarts < len(_RESTARTS):
            self._restart(model)
            return
        log.error("the model %s could not be loaded: %s", model.name, error.message)
        model.state, model.reason, model.engine = "failed", error.message, None
        model.refuse_all(
            Unavailable(f"the model {model.name!r} could not be loaded: {error.message}", code="model_failed")
        )

    def _lost(self, model: _Model, error: ModelyardError) -> None:
        log.warning("the engine of %s was lost: %s", model.name, error.message)
        model.engine, model.reason = None, error.message
        model.down_since, model.restarts = time.monotonic(), 0
        asyncio.get_running_loop().call_later(self._bounds.timeout, self._give_up, model, model.down_since)
        self._restart(model)

    def _restart(self, model: _Model) -> None:
        model.state = "loading"
        if model.replica is not None:
            model.replica.start(_RESTARTS[model.restarts])
            model.restarts += 1

    def _give_up(self, model: _Model, since: float) -> None:
        """Those who wait for this very outage have waited long enough."""
        if model.down_since == since:
            model.refuse_all(Unavailable(f"the engine of {model.name!r} was lost: {model.reason}"))
