"""The owner of all scheduling state: which models are up, who runs, who waits, and what administrators order.

Everything here happens on the event loop's thread, one call at a time, and no call awaits: a request is granted, queued
or refused before `request` returns. Opening and closing engines runs elsewhere and comes back as an event (`depot.py`).
There is no lock in the package.

A demand meets, in this order:

    1. the scheduler is closed                        → Unavailable
    2. unknown model                                  → NotFound
    3. drained by an administrator                    → Unavailable
    4. failed, unless it is time for another try      → Unavailable
    5. stopped, and a request does not load it        → Conflict
    6. down for longer than `timeout`                 → Unavailable
    7. its key has had its share                      → RateLimited
    8. a free place and nobody in front               → lease at once
    9. the queue is full                              → Overloaded
    10. otherwise it waits                            → for a place, for loading, for a restart or for memory
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from modelyard.core.engine import CacheInfo, Engine
from modelyard.core.errors import (
    Cancelled,
    Conflict,
    NotFound,
    Timeout,
    Unavailable,
)
from modelyard.core.lease import LeaseRequest, ModelStatus
from modelyard.core.pool import ModelSpec, Overrides, PoolSnapshot, RequestSnapshot
from modelyard.scheduler import snapshots
from modelyard.scheduler.appraisal import Appraiser
from modelyard.scheduler.depot import Depot
from modelyard.scheduler.limits import Allowance, KeyLimits
from modelyard.scheduler.model import Bounds, Pooled
from modelyard.scheduler.orders import Orders
from modelyard.scheduler.place import Place
from modelyard.scheduler.timers import LoopTimers, Timers
from modelyard.telemetry.broadcast import ModelChangeSubscription

__all__ = ["Bounds", "Scheduler"]

_RETRY_S = 60.0  # a model that requests load and that failed gets another try so long after


class Scheduler:
    """The whole of `core.lease.Leases` and `core.pool.Pool`."""

    def __init__(
        self,
        bounds: Bounds = Bounds(),
        *,
        limits: Mapping[str, KeyLimits] | None = None,
        appraiser: Appraiser | None = None,
        timers: Timers | None = None,
    ) -> None:
        self._bounds, self._timers = bounds, timers or LoopTimers()
        self._now = self._timers.now
        self._appraiser = appraiser or Appraiser()
        self._depot = Depot(bounds, self._timers, self._appraiser, self._forget)
        self._models = self._depot.models
        self._orders = Orders(self._depot, self._timers)
        self._places: set[Place] = set()
        self._allowances: dict[str, Allowance] = {}
        self._closed = False
        self.set_limits(limits or {})

    def __repr__(self) -> str:
        return f"<Scheduler [{'; '.join(map(repr, self._models.values()))}]>"

    # --- who may run -----------------------------------------------------------------------------------------------

    def request(self, demand: LeaseRequest) -> Place:
        if self._closed:
            raise _shutting_down()  # 1
        model = self._models.get(demand.model)
        if model is None:
            raise NotFound(f"the scheduler knows no model {demand.model!r}", code="model_not_found")  # 2
        now = self._now()
        if model.drained or not model.up:
            self._check_up(model, now)  # 3 to 6
        lane = model.lanes.get(demand.cache)
        if lane is None:  # resolved before a reload that took it away
            raise Unavailable(f"the model {demand.model!r} has no cache {demand.cache!r} any more", code="cache_gone")
        allowance = self._allowances.get(demand.key)
        if allowance is not None and not demand.is_retry:
            allowance.check(demand.tokens, now, lane.service_s)  # 7
        weight = 1 if demand.weight == 1 else model.weight(demand.cache, demand.weight)
        replica = None if lane.waiting else model.seat(demand, weight)
        if replica is not None:
            place = Place(self, model, lane, demand, weight, now, replica, replica.engine, True)  # 8
        else:
            place = Place(self, model, lane, demand, weight, now)
            lane.join(place, model.places(demand.cache))  # 9
            self._wait(place)  # 10
        self._places.add(place)
        if allowance is not None:
            self._enter(place, allowance, now)
        return place

    def _check_up(self, model: Pooled, now: float) -> None:
        name = model.name
        if model.drained:
            raise Unavailable(f"the model {name!r} is being drained and takes no requests", code="model_draining")
        if model.failed:
            wait = model.failed_at + _RETRY_S - now
            if not model.wakes or wait > 0:
                message = f"the model {name!r} could not be loaded: {model.reason}"
                raise Unavailable(message, code="model_failed", retry_after=max(1.0, wait))
            model.failed = False
        if not model.wanted and not model.wakes:
            load = f"POST /v1/admin/models/{name}/load"
            raise Conflict(f"the model {name!r} is not loaded; load it with {load}", code="model_not_loaded")
        if model.down_since is not None and now - model.down_since > self._bounds.timeout:
            raise Unavailable(f"the engine of {name!r} was lost and is not back yet: {model.reason}")

    def _wait(self, place: Place) -> None:
        place.wait()
        limits = [] if self._bounds.max_wait_s is None else [self._bounds.max_wait_s]
        if place.demand.deadline is not None:
            limits.append(place.demand.deadline - self._timers.unix())
        if limits:
            place.timer = self._timers.later(min(limits), partial(self._late, place))
        if not place.model.up:
            self._depot.look_soon()

    def _late(self, place: Place) -> None:
        if place.waits:
            self.left(place)
            waited = self._now() - place.since
            place.refuse(Timeout(f"the request waited {waited:.0f} s for a place in {place.model.name!r}"))

    def _enter(self, place: Place, allowance: Allowance, now: float) -> None:
        place.allowance = allowance
        allowance.active += 1
        if not place.demand.is_retry:
            allowance.enter(place.demand.tokens, now)

    # --- what places tell ------------------------------------------------------------------------------------------

    def released(self, place: Place) -> None:
        model, replica, now = place.model, place.replica, self._now()
        self._drop(place)
        model.running -= place.weight
        model.used = now
        place.lane.served(now - place.since - place.waited)
        if replica is not None:
            replica.give(place.demand.cache, place.weight, place.engine, now)
            if place.lane.waiting or model.current.target_inflight is not None:
                self._admit(place, now)
            if not replica.running:
                self._depot.idle(model, replica)
        if model.orders or model.retired:
            self._depot.look_soon()

    def left(self, place: Place) -> None:
        """The head may have gone: whoever stood behind it is asked."""
        model = place.model
        place.lane.leave(place)
        self._drop(place)
        self._admit(place, self._now())
        if self._depot.is_hungry or model.orders or model.retired:
            self._depot.look_soon()

    def spent(self, allowance: Allowance, tokens: int) -> None:
        allowance.spend(tokens, self._now())

    def _admit(self, place: Place, now: float) -> None:
        """Whoever may have what it had or stood for."""
        if place.model.current.target_inflight is not None:
            place.model.admit_all(now)
        else:
            place.model.admit(place.lane, now)

    def _forget(self, places: Iterable[Place]) -> None:
        for place in places:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self._places.discard(place)
        if place.allowance is not None:
            place.allowance.active -= 1

    # --- what is known ---------------------------------------------------------------------------------------------

    def status(self) -> Mapping[str, ModelStatus]:
        return {name: model.status for name, model in self._models.items()}

    def engine(self, model: str) -> Engine | None:
        for one in self._models[model].up:  # asked at every request: a generator would cost more than the answer
            if one.engine is not None and not one.engine.lost.done():
                return one.engine
        return None

    def engines(self, name: str) -> tuple[Engine, ...]:
        return tuple(one.engine for one in self._known(name).up if one.engine is not None)

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            models={name: snapshots.of_model(model, self._timers) for name, model in self._models.items()},
            retiring=tuple(snapshots.of_model(model, self._timers) for model in self._depot.retired.values()),
            devices=snapshots.of_devices(self._appraiser.hard, self._depot.held()),
        )

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """What metrics show, by their names and by model."""
        models = self._models.items()
        return {
            "queue_waiting_tokens": {name: m.waiting_tokens for name, m in models},
            "model_running": {name: m.running for name, m in models},
            "model_replicas": {name: len(m.up) for name, m in models},
            "model_loads_total": {name: m.loads for name, m in models},
            "model_failures_total": {name: m.failures for name, m in models},
            "model_evictions_total": {name: m.evictions for name, m in models},
        }

    def requests(self) -> tuple[RequestSnapshot, ...]:
        oldest_first = sorted(self._places, key=lambda place: place.since)
        return tuple(snapshots.of_request(place, self._timers) for place in oldest_first)

    def subscribe(self) -> ModelChangeSubscription:
        return self._depot.changes.listen()

    # --- what administrators order ---------------------------------------------------------------------------------

    def add(self, name: str, caches: Mapping[str, CacheInfo], make: Callable[[], Engine]) -> None:
        """Make a model known, with all else as usual. It stays stopped until `load`."""
        self._depot.add(ModelSpec(name=name, caches=caches, make=make))

    def preload(self, name: str) -> None:
        """Load it if there is room beside what is loaded; else it is loaded when somebody asks for it."""
        self._orders.preload(self._known(name))

    def load(self, name: str, overrides: Overrides | None = None) -> asyncio.Future[None]:
        return self._orders.load(self._known(name), overrides)

    def unload(self, name: str, force: bool = False) -> asyncio.Future[None]:
        model = self._known(name)
        running = [place for place in self._places if place.model is model and place.granted]
        return self._orders.unload(model, running if force else None)

    def drain(self, name: str) -> asyncio.Future[None]:
        return self._orders.drain(self._known(name))

    def scale(self, name: str, replicas: int) -> asyncio.Future[None]:
        return self._orders.scale(self._known(name), replicas)

    def reconfigure(self, blueprints: Mapping[str, ModelSpec]) -> None:
        self._orders.reconfigure(blueprints)

    def cancel(self, trace: str) -> int:
        found = [place for place in self._places if trace and place.demand.trace == trace]
        why = Cancelled("an administrator has cancelled this request")
        for place in found:
            if place.waits:
                self.left(place)
                place.refuse(why)
            else:
                place.revoke(why)
        return len(found)

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """By the name of an API key. A key whose limits did not change keeps what it has used of them."""
        now, old = self._now(), self._allowances
        self._allowances = {
            key: old[key] if key in old and old[key].limits == its else Allowance(key, its, now)
            for key, its in limits.items()
        }

    def _known(self, name: str) -> Pooled:
        if self._closed:
            raise _shutting_down()
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"there is no model {name!r}", code="model_not_found")
        return model

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        await self._depot.close(_shutting_down())


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="shutting_down")
