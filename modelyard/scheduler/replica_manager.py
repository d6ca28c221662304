"""What is done about engines that were lost: opened again, ever later, and given up at last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.pool import ModelSpec, ModelStateChange
from modelyard.scheduler.clock import Clock, TimerHandle
from modelyard.scheduler.lease import SlotLease
from modelyard.scheduler.memory_planner import DeviceBytes, MemoryPlanner
from modelyard.scheduler.policy import (
    EstimateMemory,
    KeepReplica,
    PoolAction,
    PoolView,
    RejectModel,
    ReserveMemory,
    SleepModel,
    StartReplica,
    StopReplica,
    plan,
)
from modelyard.scheduler.pooled_model import PooledModel, SchedulerOptions
from modelyard.scheduler.replica import Replica
from modelyard.telemetry.broadcast import ModelChangeBroadcast

log = logging.getLogger(__name__)

_DELAYS_S = (0.0, 0.5, 2.0, 5.0)  # before each reopening; after the last the replica is given up
_PROVEN_S = 60.0  # an engine that was up for so long did not die of being opened


class Keeper(Protocol):
    """Who has the replicas."""

    def begin(self, replica: Replica) -> None: ...
    def give_up(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None: ...
    def refuse(self, model: PooledModel, error: ModelyardError) -> None: ...


class Recovery:
    """`timeout_s` is how long requests wait for a model whose engines are all away."""

    def __init__(self, keeper: Keeper, timers: Clock, timeout_s: float) -> None:
        self._keeper, self._timers, self._timeout_s = keeper, timers, timeout_s

    def failed(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None:
        """It could not be opened. A first load is not tried again: what is wrong with it will still be wrong."""
        if replica.restarts:
            self._try_again(model, replica, error)
        else:
            self._keeper.give_up(model, replica, error)

    def lost(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None:
        log.warning("the engine of %s was lost: %s", model.name, error.message)
        now = self._timers.now()
        model.up.remove(replica)
        model.reason, model.failures = error.message, model.failures + 1
        if replica.granted or now - replica.ready_since > _PROVEN_S:
            replica.restarts = 0  # it worked: this death begins a new count
        if not model.up and model.down_since is None:
            model.down_since = now
            self._timers.later(self._timeout_s, partial(self._turn_away, model, now))
        self._try_again(model, replica, error)

    def _try_again(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None:
        if replica.restarts == len(_DELAYS_S):
            self._keeper.give_up(model, replica, error)
            return
        replica.state, replica.reason, replica.since = "restarting", error.message, self._timers.unix()
        delay = _DELAYS_S[replica.restarts]
        replica.restarts += 1
        if delay:
            self._timers.later(delay, partial(self._reopen, replica))
        else:
            self._reopen(replica)

    def _reopen(self, replica: Replica) -> None:
        if replica.state == "restarting":  # and not told to close in the meantime
            self._keeper.begin(replica)

    def _turn_away(self, model: PooledModel, since: float) -> None:
        """Those who wait for this very outage have waited long enough."""
        if model.down_since == since:
            self._keeper.refuse(model, Unavailable(f"the engine of {model.name!r} was lost: {model.reason}"))


# The models and their replicas: does what the policy says, and hears what becomes of it.
#
# All of it happens on the event loop's thread in calls that never await. Opening, closing and surveying run in tasks and
# come back as one of the calls under «what comes back».


class Depot:
    def __init__(
        self,
        bounds: SchedulerOptions,
        timers: Clock,
        appraiser: MemoryPlanner,
        refused: Callable[[list[SlotLease]], None],
    ) -> None:
        self._bounds, self._timers, self._appraiser, self._refused = bounds, timers, appraiser, refused
        self.models: dict[str, PooledModel] = {}
        self.retired: dict[str, PooledModel] = {}
        self.changes = ModelChangeBroadcast()
        self._recovery = Recovery(self, timers, bounds.timeout)
        self.is_hungry = False  # somebody waits for room: whatever becomes idle is worth a look
        self._ids = self._retirements = 0
        self._closed = self._looking = False
        self._wake: TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[PooledModel]:
        yield from self.models.values()
        yield from self.retired.values()

    def add(self, blueprint: ModelSpec) -> PooledModel:
        """Make a model known. It stays stopped until somebody wants it."""
        model = self.models[blueprint.name] = PooledModel(blueprint.name, blueprint, self._bounds)
        return model

    def retire(self, model: PooledModel) -> None:
        """New requests do not find it; those that wait and run are answered, then it stops."""
        self._retirements += 1
        del self.models[model.name]
        model.key, model.retired, model.drained = f"{model.name}#{self._retirements}", True, False
        for replica in model.replicas:
            replica.model = model.key
        self.retired[model.key] = model

    # --- looking ---------------------------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Once this turn of the loop is over: a request that is cancelled in the same turn never started a load."""
        if not self._looking and not self._closed:
            self._looking = True
            asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        self._looking = False
        if self._closed:
            return
        made = plan(self._view(), self._timers.now())
        for action in made.actions:
            self._do(action)
        self.is_hungry = any(model.target > len(model.up) for model in self)
        self._sleep_until(made.wake)
        for model in list(self):
            self._settle(model)
            self.announce(model)
            if model.retired and not model.replicas and not model.target:
                del self.retired[model.key]

    def _sleep_until(self, when: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None if when is None else self._timers.later(when - self._timers.now(), self.look)

    def _settle(self, model: PooledModel) -> None:
        """Orders that are carried out."""
        for order in [order for order in model.orders if order.met()]:
            model.orders.remove(order)
            if not order.done.done():
                order.done.set_result(None)

    def held(self) -> Iterator[DeviceBytes]:
        return (one.bytes for model in self for one in model.replicas if one.state != "placing")

    def _view(self) -> PoolView:
        room = self._appraiser.room(self.held)
        return PoolView(
            models=tuple(model.view for model in self),
            hard=room.hard,
            soft=room.soft,
            sites=room.sites,
            patience_s=self._bounds.patience_s,
            linger_s=self._bounds.linger_s,
        )

    def model_of(self, key: str) -> PooledModel:
        return self.models.get(key) or self.retired[key]

    # --- acting ----------------------------------------------------------------------------------------------------

    def _do(self, action: PoolAction) -> None:
        model = self.model_of(action.model)
        match action:
            case EstimateMemory():
                self._survey(model)
            case ReserveMemory():
                self._new(model).doing = action.why
            case StartReplica():
                self._start(model, action.replica, action.site)
            case StopReplica():
                self._stop(model, _find(model, action.replica), action.evict)
            case KeepReplica():
                self._keep(model, _find(model, action.replica))
            case SleepModel():
                self._sleep(model, action.why)
            case RejectModel():
                self.fail(model, action.error)

    def _survey(self, model: PooledModel) -> None:
        if not model.surveying:
            model.surveying = True
            self._background(self._surveyed(model))

    def _start(self, model: PooledModel, claimed: int | None, site: str) -> None:
        replica = self._new(model) if claimed is None else _find(model, claimed)
        if not model.wanted:
            model.wanted = model.blueprint.replicas
        model.sleeping = model.failed = False
        model.reason = ""
        replica.site, replica.bytes = site, model.need_at(site)
        self.begin(replica)

    def _stop(self, model: PooledModel, replica: Replica, evict: bool) -> None:
        replica.evicting = evict
        if evict:
            model.evictions += 1
            if all(one is replica or one.state in ("draining", "closing") for one in model.replicas):
                model.wanted, model.sleeping, model.reason = 0, True, "it made room for another model"
        self.stop(model, replica)

    def _keep(self, model: PooledModel, replica: Replica) -> None:
        replica.state, replica.evicting = "ready", False
        model.wanted, model.sleeping, model.reason = max(1, model.wanted), False, ""
        model.up.append(replica)
        model.admit_all(self._timers.now())

    def _sleep(self, model: PooledModel, why: str) -> None:
        model.wanted, model.sleeping, model.reason = 0, True, why
        for replica in list(model.replicas):
            self.stop(model, replica)

    def _new(self, model: PooledModel) -> Replica:
        self._ids += 1
        gauge, limit = self._appraiser.gauge(model), self._bounds.load_timeout_s
        replica = Replica(self._ids, model.key, model.current, self, load_timeout_s=limit, gauge=gauge)
        replica.since = self._timers.unix()
        model.replicas.append(replica)
        return replica

    def begin(self, replica: Replica) -> None:
        if self._closed:
            return
        replica.began, replica.since = self._timers.now(), self._timers.unix()
        replica.moves = self._appraiser.moved()
        replica.start()

    def stop(self, model: PooledModel, replica: Replica, *, force: bool = False) -> None:
        """No more requests for it; it closes when its last answer has ended, or at once."""
        if replica in model.up:
            model.up.remove(replica)
        if replica.state == "placing":
            model.replicas.remove(replica)
            return
        waits = replica.state in ("ready", "draining") and replica.running and not force
        if waits:
            replica.state = "draining"
        elif replica.state != "closing":
            replica.close()
        replica.since = self._timers.unix()

    def fail(self, model: PooledModel, error: ModelyardError) -> None:
        log.error("the model %s could not be loaded: %s", model.name, error.message)
        model.failed, model.failed_at, model.reason, model.wanted = True, self._timers.now(), error.message, 0
        model.failures += 1
        model.down_since = None
        for replica in [one for one in model.replicas if one.state == "placing"]:
            self.stop(model, replica)
        self.end_orders(model, error)
        self.refuse(model, _failed(model))

    def refuse(self, model: PooledModel, error: ModelyardError) -> None:
        self._refused(model.refuse_all(error))

    def end_orders(self, model: PooledModel, error: ModelyardError) -> None:
        """Those who wait for replicas that will not come."""
        for order in [order for order in model.orders if order.loads]:
            model.orders.remove(order)
            if not order.done.done():
                order.done.set_exception(error)

    # --- what comes back -------------------------------------------------------------------------------------------

    def idle(self, model: PooledModel, replica: Replica) -> None:
        """The replica's last answer has ended."""
        if replica.state == "draining":
            self.stop(model, replica)
        elif self.is_hungry:
            self.look_soon()
        elif model.blueprint.idle_ttl_s is not None and model.ttl_timer is None:
            # Not a look at every answer's end: one when the time may be over, and that one knows when to look again.
            model.ttl_timer = self._timers.later(model.blueprint.idle_ttl_s, partial(self._ttl, model))

    def _ttl(self, model: PooledModel) -> None:
        model.ttl_timer = None
        self.look()

    def ready(self, replica: Replica) -> None:
        if replica.state != "loading":  # told to close in the meantime
            return
        model, now = self.model_of(replica.model), self._timers.now()
        log.info("the model %s is ready", model.name)
        replica.state, replica.since, replica.ready_since, replica.idle_since = "ready", self._timers.unix(), now, now
        replica.progress, replica.doing, replica.reason = 1.0, "", ""
        model.loads += 1
        model.down_since, model.reason, model.failed = None, "", False
        if replica.settle():
            replica.bytes = model.need_at(replica.site)
        quiet = not any(each.running or (each.used or 0.0) > replica.began for each in self)
        if self._appraiser.loaded(model, replica, now - replica.began, quiet=quiet):
            self._background(self._appraiser.write())
        model.up.append(replica)
        model.admit_all(now)
        self.look()

    def failed(self, replica: Replica, error: ModelyardError) -> None:
        if replica.state == "loading":
            self._recovery.failed(self.model_of(replica.model), replica, error)
            self.look()

    def lost(self, replica: Replica, error: ModelyardError) -> None:
        if replica.state == "draining":
            self.closed(replica)
        elif replica.state == "ready":
            self._recovery.lost(self.model_of(replica.model), replica, error)
            self.look()

    def give_up(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None:
        """Nothing more is tried with this one. The model has failed where it was the last."""
        model.replicas.remove(replica)
        self._freed(model)
        staying = [one for one in model.replicas if one.state not in ("draining", "closing")]
        if not staying:
            self.fail(model, error)
            return
        log.error("a replica of %s could not be loaded: %s", model.name, error.message)
        model.wanted, model.reason = len(staying), f"a replica could not be loaded: {error.message}"
        model.failures += 1
        self.end_orders(model, error)

    def closed(self, replica: Replica) -> None:
        model = self.model_of(replica.model)
        if replica in model.up:
            model.up.remove(replica)
        model.replicas.remove(replica)
        self._freed(model)
        self.look_soon()

    def _freed(self, model: PooledModel) -> None:
        self._appraiser.moved()
        if model.current.estimate is not None:
            model.need = None  # to be looked at anew, with what is free then
        if not model.replicas and not model.wanted and not model.failed:
            model.current, model.overrides = model.blueprint, {}

    def progressed(self, replica: Replica) -> None:
        self.announce(self.model_of(replica.model))

    def announce(self, model: PooledModel) -> None:
        """Tell of it, if there is something to tell: a change of state, or a whole percent of progress."""
        told = (model.state, model.reason, model.doing, int(model.progress * 100))
        if told != model.told:
            model.told = told
            state, reason, doing, _ = told
            at, progress = self._timers.unix(), model.progress
            self.changes.tell(
                ModelStateChange(model=model.name, state=state, reason=reason, doing=doing, progress=progress, at=at)
            )

    async def _surveyed(self, model: PooledModel) -> None:
        try:
            await self._appraiser.survey(model, self.held)
        except Exception:
            log.exception("what %s takes of memory could not be found out", model.name)
            model.need = {}
        model.surveying = False
        self.look()

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, why: ModelyardError) -> None:
        """Idempotent. Every engine is closed, every order refused."""
        self._closed = True
        self._sleep_until(None)
        replicas = [one for model in self for one in model.replicas]
        for model in list(self):
            model.wanted, model.sleeping = 0, False
            self.refuse(model, why)
            self._end_all(model, why)
            for replica in list(model.replicas):
                self.stop(model, replica, force=True)
        await asyncio.gather(*(one.gone() for one in replicas), *self._tasks)
        self.changes.end()

    def _end_all(self, model: PooledModel, why: ModelyardError) -> None:
        orders, model.orders = model.orders, []
        for order in orders:
            if not order.done.done():
                order.done.set_exception(why)
        if model.ttl_timer is not None:
            model.ttl_timer.cancel()


def _find(model: PooledModel, id: int) -> Replica:
    return next(one for one in model.replicas if one.id == id)


def _failed(model: PooledModel) -> Unavailable:
    return Unavailable(f"the model {model.name!r} could not be loaded: {model.reason}", code="model_failed")
