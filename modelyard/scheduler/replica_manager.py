"""The models and their replicas: carries out the policy's plans and handles what becomes of them.

Everything happens on the event loop's thread in calls that never await. Opening, closing and estimating run in tasks
and come back as one of the `on_…` calls.

A lost engine is reopened, with growing delays, and given up after the last one. A first load that fails is not retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from modelyard.core.engine import Engine, EngineSpec
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.pool import ModelStateChange
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
from modelyard.scheduler.pooled_model import Clock, PooledModel, Replica, SlotLease, TimerHandle
from modelyard.scheduler.settings import SchedulerOptions
from modelyard.telemetry.broadcast import ModelChangeBroadcast

log = logging.getLogger(__name__)

_RESTART_DELAYS_S = (0.0, 0.5, 2.0, 5.0)  # before each reopening; after the last the replica is given up
_PROVEN_S = 60.0  # an engine that was ready for this long did not die of being opened


class ReplicaManager:
    """`models` are current; `retired` were replaced by a reload and finish their requests. `on_refused` gets the leases
    that were refused."""

    def __init__(
        self,
        options: SchedulerOptions,
        clock: Clock,
        memory_planner: MemoryPlanner,
        create: Callable[[EngineSpec, str], Engine],
        check: Callable[[EngineSpec], None] | None,
        on_refused: Callable[[list[SlotLease]], None],
    ) -> None:
        self._options, self._clock, self._planner, self._on_refused = options, clock, memory_planner, on_refused
        self.create, self.check = create, check
        self.models: dict[str, PooledModel] = {}
        self.retired: dict[str, PooledModel] = {}
        self.changes = ModelChangeBroadcast()
        self.is_short_of_memory = False  # a model misses replicas: plan again when a replica becomes idle
        self._last_replica = self._retirements = 0
        self._closed = self._scheduled = False
        self._wake: TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[PooledModel]:
        yield from self.models.values()
        yield from self.retired.values()

    def add(self, spec: EngineSpec) -> PooledModel:
        """Register a model. It stays stopped until it is wanted."""
        model = self.models[spec.model] = PooledModel(spec.model, spec, self._options)
        model.need = self._planner.unknown
        return model

    def retire(self, model: PooledModel) -> None:
        """It gets no new requests, finishes the waiting and running ones, then stops."""
        self._retirements += 1
        del self.models[model.name]
        model.key, model.is_retired, model.is_draining = f"{model.name}#{self._retirements}", True, False
        for replica in model.replicas:
            replica.model = model.key
        self.retired[model.key] = model

    def held_bytes(self) -> Iterator[DeviceBytes]:
        return (replica.bytes for model in self for replica in model.replicas if replica.state != "reserved")

    # --- planning --------------------------------------------------------------------------------------------------

    def reconcile_soon(self) -> None:
        """At the end of this loop iteration, so that a request cancelled in the same iteration never starts a load."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.reconcile)

    def reconcile(self) -> None:
        """Plan, carry out the actions, complete commands, and publish changes."""
        self._scheduled = False
        if self._closed:
            return
        budget = self._planner.budget(self.held_bytes)
        view = PoolView(
            models=tuple(self),
            hard=budget.hard,
            soft=budget.soft,
            nodes=budget.nodes,
            patience_s=self._options.patience_s,
            linger_s=self._options.linger_s,
        )
        planned = plan(view, self._clock.now())
        for action in planned.actions:
            self._execute(action)
        self.is_short_of_memory = any(model.target > len(model.ready) for model in self)
        self._wake_at(planned.wake)
        for model in list(self):
            for command in [command for command in model.commands if command.is_complete()]:
                model.commands.remove(command)
                if not command.done.done():
                    command.done.set_result(None)
            self._publish(model)
            if model.is_retired and not model.replicas and not model.target:
                del self.retired[model.key]

    def _wake_at(self, when: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None if when is None else self._clock.call_later(when - self._clock.now(), self.reconcile)

    def _model(self, key: str) -> PooledModel:
        return self.models.get(key) or self.retired[key]

    def _execute(self, action: PoolAction) -> None:
        model = self._model(action.model)
        match action:
            case EstimateMemory():
                if not model.is_estimating:
                    model.is_estimating = True
                    self._run_in_background(self._estimate(model))
            case ReserveMemory(reason=reason):
                self._new_replica(model).phase = reason
            case StartReplica(replica=reserved, node=node):
                replica = self._new_replica(model) if reserved is None else _find(model, reserved)
                model.desired = model.desired or model.spec.replicas
                model.is_sleeping, model.is_failed, model.reason = False, False, ""
                replica.node, replica.bytes = node, model.need_on(node)
                self._start(replica)
            case StopReplica(replica=id, evict=evict):
                replica = _find(model, id)
                replica.evicting = evict
                if evict:
                    model.evictions += 1
                    if all(one is replica or one.is_stopping for one in model.replicas):
                        model.desired, model.is_sleeping, model.reason = 0, True, "evicted to load another model"
                self.stop(model, replica)
            case KeepReplica(replica=id):
                replica = _find(model, id)
                replica.state, replica.evicting = "ready", False
                model.desired, model.is_sleeping, model.reason = max(1, model.desired), False, ""
                model.ready.append(replica)
                model.admit_all(self._clock.now())
            case SleepModel(reason=reason):
                model.desired, model.is_sleeping, model.reason = 0, True, reason
                for replica in list(model.replicas):
                    self.stop(model, replica)
            case RejectModel(error=error):
                self._fail_model(model, error)

    # --- replicas --------------------------------------------------------------------------------------------------

    def _new_replica(self, model: PooledModel) -> Replica:
        self._last_replica += 1
        replica = Replica(
            self._last_replica,
            model.key,
            model.active_spec,
            self,
            load_timeout_s=self._options.load_timeout_s,
            meter=self._planner.meter_for(model),
        )
        replica.since = self._clock.unix()
        model.replicas.append(replica)
        return replica

    def _start(self, replica: Replica) -> None:
        if self._closed:
            return
        replica.load_started, replica.since = self._clock.now(), self._clock.unix()
        replica.allocation = self._planner.count_allocation()
        replica.start()

    def stop(self, model: PooledModel, replica: Replica, *, force: bool = False) -> None:
        """It gets no more requests and closes when its last request ends, or at once with `force`."""
        if replica in model.ready:
            model.ready.remove(replica)
        if replica.state == "reserved":
            model.replicas.remove(replica)
            return
        if replica.state in ("ready", "draining") and replica.running and not force:
            replica.state = "draining"
        elif replica.state != "closing":
            replica.close()
        replica.since = self._clock.unix()

    def _fail_model(self, model: PooledModel, error: ModelyardError) -> None:
        log.error("loading the model %s failed: %s", model.name, error.message)
        model.is_failed, model.failed_at, model.reason, model.desired = True, self._clock.now(), error.message, 0
        model.failures += 1
        model.down_since = None
        for replica in [one for one in model.replicas if one.state == "reserved"]:
            self.stop(model, replica)
        self.fail_load_commands(model, error)
        self.refuse_waiting(model, model_failed(model))

    def refuse_waiting(self, model: PooledModel, error: ModelyardError) -> None:
        self._on_refused(model.refuse_all(error))

    def fail_load_commands(self, model: PooledModel, error: ModelyardError) -> None:
        """The replicas that these commands wait for will not come."""
        for command in [command for command in model.commands if command.loads]:
            model.commands.remove(command)
            if not command.done.done():
                command.done.set_exception(error)

    def _give_up(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None:
        """Remove the replica. If it was the last one, the model has failed."""
        model.replicas.remove(replica)
        self._on_memory_freed(model)
        staying = [one for one in model.replicas if not one.is_stopping]
        if not staying:
            self._fail_model(model, error)
            return
        log.error("loading a replica of %s failed: %s", model.name, error.message)
        model.desired, model.reason = len(staying), f"loading a replica failed: {error.message}"
        model.failures += 1
        self.fail_load_commands(model, error)

    def _restart(self, model: PooledModel, replica: Replica, error: ModelyardError) -> None:
        if replica.restarts == len(_RESTART_DELAYS_S):
            self._give_up(model, replica, error)
            return
        replica.state, replica.reason, replica.since = "restarting", error.message, self._clock.unix()
        delay = _RESTART_DELAYS_S[replica.restarts]
        replica.restarts += 1

        def reopen() -> None:
            if replica.state == "restarting":  # not stopped in the meantime
                self._start(replica)

        if delay:
            self._clock.call_later(delay, reopen)
        else:
            reopen()

    # --- events ----------------------------------------------------------------------------------------------------

    def on_idle(self, model: PooledModel, replica: Replica) -> None:
        """The replica's last request has ended."""
        if replica.state == "draining":
            self.stop(model, replica)
        elif self.is_short_of_memory:
            self.reconcile_soon()
        elif (ttl := model.idle_ttl_s) is not None and (model.ttl_timer is None or ttl < model.ttl_timer_s):
            # Not a plan per request: one when the TTL may be over, and that plan knows when to look again.
            if model.ttl_timer is not None:
                model.ttl_timer.cancel()
            model.ttl_timer, model.ttl_timer_s = self._clock.call_later(ttl, partial(self._on_ttl, model)), ttl

    def _on_ttl(self, model: PooledModel) -> None:
        model.ttl_timer = None
        self.reconcile()

    def on_ready(self, replica: Replica) -> None:
        if replica.state != "loading":  # stopped in the meantime
            return
        model, now = self._model(replica.model), self._clock.now()
        estimate = model.estimate
        layers = (
            f", {estimate.gpu_layers} of {estimate.layers} layers on the GPU"
            if estimate and estimate.gpu_layers
            else ""
        )
        log.info("the model %s is ready%s", model.name, layers)
        replica.state, replica.since, replica.ready_since, replica.idle_since = "ready", self._clock.unix(), now, now
        replica.progress, replica.phase, replica.reason = 1.0, "", ""
        model.loads += 1
        model.down_since, model.reason, model.is_failed = None, "", False
        if replica.update_node():
            replica.bytes = model.need_on(replica.node)
        quiet = not any(each.running or (each.last_used or 0.0) > replica.load_started for each in self)
        if self._planner.record_load(model, replica, now - replica.load_started, quiet=quiet):
            self._run_in_background(self._planner.save())
        model.ready.append(replica)
        model.admit_all(now)
        self.reconcile()

    def on_load_failed(self, replica: Replica, error: ModelyardError) -> None:
        if replica.state != "loading":
            return
        model = self._model(replica.model)
        if replica.restarts:
            self._restart(model, replica, error)
        else:  # a first load: the next attempt would fail in the same way
            self._give_up(model, replica, error)
        self.reconcile()

    def on_lost(self, replica: Replica, error: ModelyardError) -> None:
        if replica.state == "draining":
            self.on_closed(replica)
            return
        if replica.state != "ready":
            return
        model, now = self._model(replica.model), self._clock.now()
        log.warning("the engine of %s was lost: %s", model.name, error.message)
        model.ready.remove(replica)
        model.reason, model.failures = error.message, model.failures + 1
        if replica.granted or now - replica.ready_since > _PROVEN_S:
            replica.restarts = 0  # it worked: start counting again
        if not model.ready and model.down_since is None:
            model.down_since = now
            self._clock.call_later(self._options.timeout_s, partial(self._refuse_after_outage, model, now))
        self._restart(model, replica, error)
        self.reconcile()

    def _refuse_after_outage(self, model: PooledModel, since: float) -> None:
        if model.down_since == since:
            self.refuse_waiting(model, Unavailable(f"the engine of {model.name!r} was lost: {model.reason}"))

    def on_closed(self, replica: Replica) -> None:
        model = self._model(replica.model)
        if replica in model.ready:
            model.ready.remove(replica)
        model.replicas.remove(replica)
        self._on_memory_freed(model)
        self.reconcile_soon()

    def _on_memory_freed(self, model: PooledModel) -> None:
        self._planner.count_allocation()
        model.need = self._planner.unknown  # estimate again with the memory that is free then
        if not model.replicas and not model.desired and not model.is_failed:
            model.active_spec, model.overrides = model.spec, {}

    def on_progress(self, replica: Replica) -> None:
        self._publish(self._model(replica.model))

    def _publish(self, model: PooledModel) -> None:
        """Publish a change of state, or a whole percent of progress."""
        progress = model.progress
        current = (model.state, model.reason, model.phase, int(progress * 100))
        if current != model.published:
            model.published = current
            state, reason, phase, _ = current
            self.changes.publish(
                ModelStateChange(
                    model=model.name, state=state, reason=reason, phase=phase, progress=progress, at=self._clock.unix()
                )
            )

    async def _estimate(self, model: PooledModel) -> None:
        try:
            await self._planner.estimate(model, self.held_bytes)
        except Exception:
            log.exception("estimating the memory of %s failed", model.name)
            model.need = {}
        model.is_estimating = False
        self.reconcile()

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, error: ModelyardError) -> None:
        """Close every engine and refuse every lease and command with `error`. Idempotent."""
        self._closed = True
        self._wake_at(None)
        replicas = [replica for model in self for replica in model.replicas]
        for model in list(self):
            model.desired, model.is_sleeping = 0, False
            self.refuse_waiting(model, error)
            commands, model.commands = model.commands, []
            for command in commands:
                if not command.done.done():
                    command.done.set_exception(error)
            if model.ttl_timer is not None:
                model.ttl_timer.cancel()
            for replica in list(model.replicas):
                self.stop(model, replica, force=True)
        await asyncio.gather(*(replica.wait_closed() for replica in replicas), *self._tasks)
        self.changes.close()


def _find(model: PooledModel, id: int) -> Replica:
    return next(replica for replica in model.replicas if replica.id == id)


def model_failed(model: PooledModel, retry_after: float = 1.0) -> Unavailable:
    message = f"the model {model.name!r} could not be loaded: {model.reason}"
    return Unavailable(message, code="model_failed", retry_after=retry_after)
