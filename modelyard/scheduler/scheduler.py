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
from modelyard.core.errors import Cancelled, Conflict, InvalidRequest, NotFound, Timeout, Unavailable
from modelyard.core.lease import LeaseRequest, ModelStatus
from modelyard.core.pool import (
    DeviceSnapshot,
    ModelSnapshot,
    ModelSpec,
    Overrides,
    PoolSnapshot,
    ReplicaSnapshot,
    RequestSnapshot,
)
from modelyard.scheduler.clock import Clock, LoopClock
from modelyard.scheduler.lease import SlotLease
from modelyard.scheduler.memory_planner import DeviceBytes, MemoryPlanner
from modelyard.scheduler.pooled_model import PendingCommand, PooledModel, SchedulerOptions
from modelyard.scheduler.rate_limit import KeyLimits, KeyRateLimiter
from modelyard.scheduler.replica import Replica
from modelyard.scheduler.replica_manager import Depot
from modelyard.telemetry.broadcast import ModelChangeSubscription

__all__ = ["Scheduler", "SchedulerOptions"]

# The pool as administrators see it: records turned into values.


def of_model(model: PooledModel, timers: Clock) -> ModelSnapshot:
    lanes, now = model.lanes.values(), timers.now()
    services = [lane.service_s for lane in lanes if lane.service_s is not None]
    oldest = min((since for lane in lanes if (since := lane.oldest()) is not None), default=None)
    status = model.status
    return ModelSnapshot(
        name=model.name,
        state=status.state,
        reason=model.reason,
        doing=model.doing,
        progress=model.progress,
        waiting=status.waiting,
        waiting_tokens=model.waiting_tokens,
        running=model.running,
        places=sum(one.most for one in model.up),
        replicas=tuple(map(of_replica, model.replicas)),
        replicas_wanted=model.wanted,
        replica_max=model.blueprint.replica_max,
        target_inflight=model.blueprint.target_inflight,
        autoload=model.blueprint.autoload,
        idle_ttl_s=model.blueprint.idle_ttl_s,
        loads_on_request=status.loads_on_request,
        capabilities=status.capabilities,
        caches=model.current.caches,
        overrides=model.overrides,
        estimate=model.estimate,
        measured=model.measured,
        load_s=model.load_s,
        loads=model.loads,
        failures=model.failures,
        evictions=model.evictions,
        last_used=None if model.used is None else timers.unix() - (now - model.used),
        service_s=sum(services) / len(services) if services else None,
        wait_s=None if oldest is None else now - oldest,
    )


def of_replica(one: Replica) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        id=one.id,
        state=one.state,
        running=one.running,
        since=one.since,
        progress=one.progress,
        doing=one.doing,
        reason=one.reason,
        pid=one.pid,
    )


def of_request(place: SlotLease, timers: Clock) -> RequestSnapshot:
    demand, age = place.demand, timers.now() - place.since
    return RequestSnapshot(
        trace=demand.trace,
        model=place.model.name,
        cache=demand.cache,
        state="running" if place.granted else "waiting",
        key=demand.key,
        session=demand.session,
        priority=demand.priority,
        tokens=demand.tokens,
        weight=place.weight,
        position=place.position,
        replica=None if place.replica is None else place.replica.id,
        since=timers.unix() - age,
        waited=place.waited if place.granted else age,
    )


def of_devices(hard: DeviceBytes, held: Iterable[DeviceBytes]) -> tuple[DeviceSnapshot, ...]:
    taken: dict[str, int] = dict.fromkeys(hard, 0)
    for bytes_ in held:
        for device, amount in bytes_.items():
            taken[device] = taken.get(device, 0) + amount
    return tuple(DeviceSnapshot(device, hard.get(device), amount) for device, amount in taken.items())


# What administrators order: load, unload, drain, scale, and a new configuration.
#
# Every order changes what is wanted and has the depot look; it is done when the pool has become what was ordered. Orders
# are looked at after every change, so it does not matter who or what brought the pool there.


class Orders:
    def __init__(self, depot: Depot, timers: Clock) -> None:
        self._depot, self._timers = depot, timers

    def preload(self, model: PooledModel) -> None:
        model.wanted = model.blueprint.replicas
        self._depot.look_soon()

    def load(self, model: PooledModel, overrides: Overrides | None) -> asyncio.Future[None]:
        wanted = dict(overrides or {})
        if wanted != model.overrides and (overrides is not None or not model.replicas):
            self._alter(model, wanted)
        model.drained = model.failed = model.sleeping = False
        model.wanted = model.wanted or model.blueprint.replicas
        return self._order(model, lambda: bool(model.up), loads=True)

    def _alter(self, model: PooledModel, overrides: Overrides) -> None:
        if model.replicas:
            raise Conflict(
                f"the model {model.name!r} is loaded with other settings; unload it first", code="model_loaded"
            )
        altered = model.blueprint.altered
        if overrides and altered is None:
            raise InvalidRequest(f"nothing can be overridden when {model.name!r} is loaded", code="bad_override")
        model.current = altered(overrides) if overrides and altered is not None else model.blueprint
        model.overrides = overrides
        model.need = None if model.current.estimate is not None else {}

    def unload(self, model: PooledModel, revoked: Iterable[SlotLease] | None) -> asyncio.Future[None]:
        """`revoked` are those who must not finish; None: they may."""
        why = Unavailable(f"the model {model.name!r} was unloaded", code="model_unloaded")
        model.wanted, model.reason, model.down_since = 0, "", None
        model.sleeping = model.drained = model.failed = False
        self._depot.end_orders(model, Conflict(f"the model {model.name!r} was unloaded before it was ready"))
        self._depot.refuse(model, why)
        for place in revoked or ():
            place.revoke(why)
        for replica in list(model.replicas) if revoked is not None else ():
            self._depot.stop(model, replica, force=True)
        return self._order(model, lambda: not model.replicas)

    def drain(self, model: PooledModel) -> asyncio.Future[None]:
        if not model.wanted:
            raise Conflict(f"the model {model.name!r} is not loaded", code="model_not_loaded")
        model.drained = True
        return self._order(model, lambda: not model.running and not model.waiting)

    def scale(self, model: PooledModel, replicas: int) -> asyncio.Future[None]:
        most = model.blueprint.replica_max
        if not 1 <= replicas <= most:
            message = f"{model.name!r} may have 1 to {most} replicas: replica_max sets the most, unload takes all away"
            raise InvalidRequest(message, param="replicas", code="replicas_out_of_range")
        model.wanted, model.failed, model.sleeping = replicas, False, False
        return self._order(model, lambda: len(model.up) == replicas == len(model.replicas), loads=True)

    def _order(self, model: PooledModel, met: Callable[[], bool], *, loads: bool = False) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_seen)
        model.orders.append(PendingCommand(done, self._timers.now(), met, loads))
        self._depot.look()
        return done

    # --- a new configuration ------------------------------------------------------------------------------------------

    def reconfigure(self, blueprints: Mapping[str, ModelSpec]) -> None:
        models = self._depot.models
        known = bool(models)  # the first models of all are made known before a loop runs
        for name, model in list(models.items()):
            new = blueprints.get(name)
            if new is not None and new.identity and new.identity == model.blueprint.identity:
                _adjust(model, new)
                model.admit_all(self._timers.now())
            else:
                self._replace(model, new)
        for name, blueprint in blueprints.items():
            if name not in models:
                self._depot.add(blueprint).wanted = blueprint.replicas if known and blueprint.enabled else 0
            models[name] = models.pop(name)  # in the order of the new configuration
        if known:
            self._depot.look_soon()

    def _replace(self, model: PooledModel, new: ModelSpec | None) -> None:
        wanted = model.wanted
        self._depot.retire(model)
        self._depot.end_orders(model, Conflict(f"the configuration of {model.name!r} was changed while it was loaded"))
        if new is not None:
            self._depot.add(new).wanted = new.replicas if wanted else 0


def _adjust(model: PooledModel, new: ModelSpec) -> None:
    """The same engine: it goes on, and only how it is run changes."""
    if model.wanted and new.replicas != model.blueprint.replicas:
        model.wanted = new.replicas
    model.blueprint = new
    if not model.overrides:
        model.current = new
        for replica in model.replicas:
            replica.adjust(new)


def _seen(done: asyncio.Future[None]) -> None:
    """Nobody has to await an order: an error that nobody reads is none of the loop's business."""
    if not done.cancelled():
        done.exception()


_RETRY_S = 60.0  # a model that requests load and that failed gets another try so long after


class Scheduler:
    """The whole of `core.lease.Leases` and `core.pool.Pool`."""

    def __init__(
        self,
        bounds: SchedulerOptions = SchedulerOptions(),
        *,
        limits: Mapping[str, KeyLimits] | None = None,
        appraiser: MemoryPlanner | None = None,
        timers: Clock | None = None,
    ) -> None:
        self._bounds, self._timers = bounds, timers or LoopClock()
        self._now = self._timers.now
        self._appraiser = appraiser or MemoryPlanner()
        self._depot = Depot(bounds, self._timers, self._appraiser, self._forget)
        self._models = self._depot.models
        self._orders = Orders(self._depot, self._timers)
        self._places: set[SlotLease] = set()
        self._allowances: dict[str, KeyRateLimiter] = {}
        self._closed = False
        self.set_limits(limits or {})

    def __repr__(self) -> str:
        return f"<Scheduler [{'; '.join(map(repr, self._models.values()))}]>"

    # --- who may run -----------------------------------------------------------------------------------------------

    def request(self, demand: LeaseRequest) -> SlotLease:
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
            place = SlotLease(self, model, lane, demand, weight, now, replica, replica.engine, True)  # 8
        else:
            place = SlotLease(self, model, lane, demand, weight, now)
            lane.join(place, model.places(demand.cache))  # 9
            self._wait(place)  # 10
        self._places.add(place)
        if allowance is not None:
            self._enter(place, allowance, now)
        return place

    def _check_up(self, model: PooledModel, now: float) -> None:
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

    def _wait(self, place: SlotLease) -> None:
        place.wait()
        limits = [] if self._bounds.max_wait_s is None else [self._bounds.max_wait_s]
        if place.demand.deadline is not None:
            limits.append(place.demand.deadline - self._timers.unix())
        if limits:
            place.timer = self._timers.later(min(limits), partial(self._late, place))
        if not place.model.up:
            self._depot.look_soon()

    def _late(self, place: SlotLease) -> None:
        if place.waits:
            self.left(place)
            waited = self._now() - place.since
            place.refuse(Timeout(f"the request waited {waited:.0f} s for a place in {place.model.name!r}"))

    def _enter(self, place: SlotLease, allowance: KeyRateLimiter, now: float) -> None:
        place.allowance = allowance
        allowance.active += 1
        if not place.demand.is_retry:
            allowance.enter(place.demand.tokens, now)

    # --- what places tell ------------------------------------------------------------------------------------------

    def released(self, place: SlotLease) -> None:
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

    def left(self, place: SlotLease) -> None:
        """The head may have gone: whoever stood behind it is asked."""
        model = place.model
        place.lane.leave(place)
        self._drop(place)
        self._admit(place, self._now())
        if self._depot.is_hungry or model.orders or model.retired:
            self._depot.look_soon()

    def spent(self, allowance: KeyRateLimiter, tokens: int) -> None:
        allowance.spend(tokens, self._now())

    def _admit(self, place: SlotLease, now: float) -> None:
        """Whoever may have what it had or stood for."""
        if place.model.current.target_inflight is not None:
            place.model.admit_all(now)
        else:
            place.model.admit(place.lane, now)

    def _forget(self, places: Iterable[SlotLease]) -> None:
        for place in places:
            self._drop(place)

    def _drop(self, place: SlotLease) -> None:
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
            models={name: of_model(model, self._timers) for name, model in self._models.items()},
            retiring=tuple(of_model(model, self._timers) for model in self._depot.retired.values()),
            devices=of_devices(self._appraiser.hard, self._depot.held()),
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
        return tuple(of_request(place, self._timers) for place in oldest_first)

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
            key: old[key] if key in old and old[key].limits == its else KeyRateLimiter(key, its, now)
            for key, its in limits.items()
        }

    def _known(self, name: str) -> PooledModel:
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
