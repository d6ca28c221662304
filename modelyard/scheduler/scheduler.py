"""The owner of all scheduling state: which models are loaded, which requests run and wait, and the admin operations.

Everything happens on the event loop's thread, one call at a time, and no call awaits: a request is granted, queued or
refused before `request` returns. Opening and closing engines runs in tasks and comes back as an event
(`replica_manager.py`). There is no lock in this package.

The checks of a request, in order:

    1. the scheduler is closed                        → Unavailable
    2. unknown model                                  → NotFound
    3. drained by an administrator                    → Unavailable
    4. failed, unless it is time for another try      → Unavailable
    5. stopped, and a request does not load it        → Conflict
    6. all engines lost for longer than `timeout_s`   → Unavailable
    7. a rate limit of its key                        → KeyLimited
    8. a free slot and nothing ahead in the queue     → a lease at once
    9. the queue is full                              → Overloaded
    10. otherwise it waits                            → for a slot, a load, a restart or memory
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from modelyard.core.engine import Engine, EngineSpec
from modelyard.core.errors import BY_ADMINISTRATOR, Cancelled, Conflict, InvalidRequest, NotFound, Timeout, Unavailable
from modelyard.core.pool import (
    DeviceSnapshot,
    KeyLimits,
    LeaseRequest,
    ModelStatus,
    Override,
    Overrides,
    PoolSnapshot,
    RequestSnapshot,
)
from modelyard.scheduler.memory_planner import DeviceBytes, MemoryPlanner
from modelyard.scheduler.pooled_model import Clock, PendingCommand, PooledModel, SlotLease
from modelyard.scheduler.queue import RequestQueue
from modelyard.scheduler.rate_limit import KeyRateLimiter
from modelyard.scheduler.replica_manager import ReplicaManager, model_failed
from modelyard.scheduler.settings import SchedulerOptions
from modelyard.telemetry.broadcast import ModelChangeSubscription

_RETRY_FAILED_S = 60.0  # a failed model that requests load gets another try after this time


class Scheduler:
    """Implements `core.lease.LeaseProvider` and `core.pool.Pool`."""

    is_connected = True

    def __init__(
        self,
        options: SchedulerOptions = SchedulerOptions(),
        *,
        create: Callable[[EngineSpec, str], Engine],
        check: Callable[[EngineSpec], None] | None = None,
        limits: Mapping[str, KeyLimits] | None = None,
        memory_planner: MemoryPlanner | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._options, self._clock = options, clock or Clock()
        self._now = self._clock.now
        self._memory_planner = memory_planner or MemoryPlanner()
        self._manager = ReplicaManager(options, self._clock, self._memory_planner, create, check, self._forget)
        self._override: Override | None = None
        self._models = self._manager.models
        self._leases: set[SlotLease] = set()
        self._timed: set[RequestQueue[SlotLease]] = set()  # have slots that are kept for some keys, and a timer
        self._rate_limiters: dict[str, KeyRateLimiter] = {}
        self._closed = False
        self.set_limits(limits or {})

    def __repr__(self) -> str:
        return f"<Scheduler [{'; '.join(map(repr, self._models.values()))}]>"

    # --- requests --------------------------------------------------------------------------------------------------

    def request(self, request: LeaseRequest) -> SlotLease:
        if self._closed:
            raise _shutting_down()  # 1
        model = self._models.get(request.model)
        if model is None:
            raise NotFound(f"unknown model {request.model!r}", code="model_not_found")  # 2
        now = self._now()
        if model.is_draining or not model.ready:
            self._check_available(model, now)  # 3 to 6
        queue = model.queues.get(request.cache)
        if queue is None:  # resolved before a reload that removed the cache
            raise Unavailable(f"the model {request.model!r} no longer has a cache {request.cache!r}", code="cache_gone")
        limiter = self._rate_limiters.get(request.key)
        if limiter is not None and not request.is_retry:
            limiter.check(request.tokens, now, queue.service_s)  # 7
        weight = 1 if request.weight == 1 else model.weight(request.cache, request.weight)
        lease = SlotLease(self, model, queue, request, weight, now)
        if not queue.waiting and model.may_start(lease, now) and (replica := model.assign(request, weight)) is not None:
            lease.replica, lease.engine, lease.granted = replica, replica.engine, True  # 8
        else:
            self._enqueue(lease)  # 9, 10
        self._leases.add(lease)
        if limiter is not None:
            lease.rate_limiter = limiter
            limiter.active += 1
            if not request.is_retry:
                limiter.start_request(request.tokens, now)
        return lease

    def _check_available(self, model: PooledModel, now: float) -> None:
        name = model.name
        if model.is_draining:
            raise Unavailable(f"the model {name!r} is being drained and takes no requests", code="model_draining")
        if model.is_failed:
            wait = model.failed_at + _RETRY_FAILED_S - now
            if not model.loads_on_request or wait > 0:
                raise model_failed(model, retry_after=max(1.0, wait))
            model.is_failed = False
        if not model.desired and not model.loads_on_request:
            load = f"POST /v1/admin/models/{name}/load"
            raise Conflict(f"the model {name!r} is not loaded; load it with {load}", code="model_not_loaded")
        if model.down_since is not None and now - model.down_since > self._options.timeout_s:
            raise Unavailable(f"the engine of {name!r} was lost and is not back yet: {model.reason}")

    def _enqueue(self, lease: SlotLease) -> None:
        queue, slots = lease.queue, lease.model.slots(lease.request.cache)
        for displaced in queue.displaced_by(lease):
            queue.remove(displaced)
            self._forget((displaced,))
            displaced.refuse(queue.overloaded("other keys wait, too", slots))
        queue.add(lease, slots)
        self._start_waiting(lease)
        if lease.model.ready:  # a slot may be kept for this key
            self._admit_next(lease, self._now())

    def _start_waiting(self, lease: SlotLease) -> None:
        lease.future = asyncio.get_running_loop().create_future()
        limits = [] if self._options.max_wait_s is None else [self._options.max_wait_s]
        if lease.request.deadline is not None:
            limits.append(lease.request.deadline - self._now())
        if limits:
            lease.timer = self._clock.call_later(min(limits), partial(self._on_wait_timeout, lease))
        if not lease.model.ready:
            self._manager.reconcile_soon()

    def _on_wait_timeout(self, lease: SlotLease) -> None:
        if lease.is_waiting:
            self.leave_queue(lease)
            waited = self._now() - lease.since
            lease.refuse(Timeout(f"the request waited {waited:.0f} s for a free slot of {lease.model.name!r}"))

    # --- events of leases ------------------------------------------------------------------------------------------

    def on_released(self, lease: SlotLease) -> None:
        model, replica, now = lease.model, lease.replica, self._now()
        self._forget((lease,))
        model.running -= lease.weight
        model.last_used, model.keep_alive = now, lease.request.keep_alive
        lease.queue.record_service(now - lease.since - lease.waited)
        if replica is not None:
            replica.release(lease.request.cache, lease.weight, lease.engine, now)
            lease.queue.release(lease.request.key, lease.weight, now)
            if lease.queue.waiting or model.active_spec.target_inflight is not None:
                self._admit_next(lease, now)
            if not replica.running:
                self._manager.on_idle(model, replica)
        if model.commands or model.is_retired:
            self._manager.reconcile_soon()

    def leave_queue(self, lease: SlotLease) -> None:
        """It may have been the head: try to admit the leases behind it."""
        model = lease.model
        lease.queue.remove(lease)
        self._forget((lease,))
        self._admit_next(lease, self._now())
        if self._manager.is_short_of_memory or model.commands or model.is_retired:
            self._manager.reconcile_soon()

    def on_tokens_spent(self, limiter: KeyRateLimiter, tokens: int) -> None:
        limiter.spend(tokens, self._now())

    def _admit_next(self, lease: SlotLease, now: float) -> None:
        if lease.model.active_spec.target_inflight is not None:  # all caches share the limit
            lease.model.admit_all(now)
        else:
            lease.model.admit(lease.queue, now)
        if lease.queue.waiting and (until := lease.queue.slots.kept_until(now)) is not None:
            self._admit_later(lease, until - now)

    def _admit_later(self, lease: SlotLease, delay: float) -> None:
        """Slots may be free, and are kept for other keys until then."""
        queue = lease.queue

        def admit() -> None:
            self._timed.discard(queue)
            self._admit_next(lease, self._now())

        if queue not in self._timed:
            self._timed.add(queue)
            self._clock.call_later(delay, admit)

    def _forget(self, leases: Iterable[SlotLease]) -> None:
        for lease in leases:
            self._leases.discard(lease)
            if lease.rate_limiter is not None:
                lease.rate_limiter.active -= 1

    # --- status ----------------------------------------------------------------------------------------------------

    def status(self) -> Mapping[str, ModelStatus]:
        return {name: model.status for name, model in self._models.items()}

    def engine(self, model: str) -> Engine | None:
        for replica in self._models[model].ready:  # called for every request: a loop is cheaper than a generator
            if replica.engine is not None and not replica.engine.lost.done():
                return replica.engine
        return None

    def engines(self, name: str) -> tuple[Engine, ...]:
        return tuple(replica.engine for replica in self._get(name).ready if replica.engine is not None)

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            models={name: model.snapshot(self._clock) for name, model in self._models.items()},
            retiring=tuple(model.snapshot(self._clock) for model in self._manager.retired.values()),
            devices=_device_snapshots(self._memory_planner.hard, self._manager.held_bytes()),
        )

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        """Values by metric name and model."""
        models = self._models.items()
        return {
            "queue_waiting_tokens": {name: m.waiting_tokens for name, m in models},
            "model_running": {name: m.running for name, m in models},
            "model_replicas": {name: len(m.ready) for name, m in models},
            "model_loads_total": {name: m.loads for name, m in models},
            "model_failures_total": {name: m.failures for name, m in models},
            "model_evictions_total": {name: m.evictions for name, m in models},
        }

    def requests(self) -> tuple[RequestSnapshot, ...]:
        oldest_first = sorted(self._leases, key=lambda lease: lease.since)
        return tuple(_request_snapshot(lease, self._clock) for lease in oldest_first)

    def subscribe(self) -> ModelChangeSubscription:
        return self._manager.changes.subscribe()

    # --- admin operations ------------------------------------------------------------------------------------------
    # Each one changes what is wanted and plans. Its future is done when the pool has reached that state, whatever
    # brought it there: pending commands are checked after every plan.

    def preload(self, name: str) -> None:
        """Load it if it fits beside the loaded models; otherwise the first request loads it."""
        model = self._get(name)
        model.desired = model.spec.replicas
        self._manager.reconcile_soon()

    def load(self, name: str, overrides: Overrides | None = None) -> asyncio.Future[None]:
        model, wanted = self._get(name), dict(overrides or {})
        if wanted != model.overrides and (overrides is not None or not model.replicas):
            self._set_overrides(model, wanted)
        model.is_draining = model.is_failed = model.is_sleeping = False
        model.desired = model.desired or model.spec.replicas
        return self._command(model, lambda: bool(model.ready), loads=True)

    def _set_overrides(self, model: PooledModel, overrides: Overrides) -> None:
        """A bad override is refused as such in every state."""
        spec = model.spec
        if overrides:
            if self._override is None:
                raise InvalidRequest(f"the model {model.name!r} allows no overrides", code="bad_override")
            spec = self._override(model.name, overrides)
        if model.replicas:
            raise Conflict(
                f"the model {model.name!r} is loaded with other settings; unload it first", code="model_loaded"
            )
        model.active_spec, model.overrides = spec, overrides
        model.need = self._memory_planner.unknown

    def unload(self, name: str, force: bool = False) -> asyncio.Future[None]:
        model = self._get(name)
        running = [lease for lease in self._leases if lease.model is model and lease.granted] if force else []
        error = Unavailable(f"the model {model.name!r} was unloaded", code="model_unloaded")
        model.desired, model.reason, model.down_since = 0, "", None
        model.is_sleeping = model.is_draining = model.is_failed = False
        aborted = Conflict(f"the model {model.name!r} was unloaded before it was ready")
        self._manager.fail_load_commands(model, aborted)
        self._manager.refuse_waiting(model, error)
        for lease in running:
            lease.revoke(error)
        if force:
            for replica in list(model.replicas):
                self._manager.stop(model, replica, force=True)
        return self._command(model, lambda: not model.replicas)

    def drain(self, name: str) -> asyncio.Future[None]:
        model = self._get(name)
        if not model.desired:
            raise Conflict(f"the model {model.name!r} is not loaded", code="model_not_loaded")
        model.is_draining = True
        return self._command(model, lambda: not model.running and not model.waiting)

    def scale(self, name: str, replicas: int) -> asyncio.Future[None]:
        model = self._get(name)
        limit = model.spec.replica_max
        if not 1 <= replicas <= limit:
            message = f"{model.name!r} may have 1 to {limit} replicas (replica_max); to stop all of them, unload it"
            raise InvalidRequest(message, param="replicas", code="replicas_out_of_range")
        model.desired, model.is_failed, model.is_sleeping = replicas, False, False
        return self._command(model, lambda: len(model.ready) == replicas == len(model.replicas), loads=True)

    def _command(
        self, model: PooledModel, is_complete: Callable[[], bool], *, loads: bool = False
    ) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The caller need not await a command: mark its exception retrieved, or asyncio warns about it.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        model.commands.append(PendingCommand(done, self._now(), is_complete, loads))
        self._manager.reconcile()
        return done

    def reconfigure(self, specs: Mapping[str, EngineSpec], override: Override | None = None) -> None:
        """A model whose engine changes is loaded anew; a failed model gets another try, whatever has changed."""
        self._override = override
        is_reload = bool(self._models)  # the first models are registered before a loop runs
        for name, model in list(self._models.items()):
            new = specs.get(name)
            if new is not None and new.identity and new.identity == model.spec.identity:
                self._update_spec(model, new)
                model.admit_all(self._now())
                continue
            was_wanted = model.desired or model.is_failed
            self._manager.retire(model)
            changed = Conflict(f"the configuration of {name!r} changed while it was loading")
            self._manager.fail_load_commands(model, changed)
            if new is not None:
                self._manager.add(new).desired = new.replicas if was_wanted else 0
        for name, spec in specs.items():
            if name not in self._models:
                self._manager.add(spec).desired = spec.replicas if is_reload and spec.enabled else 0
            self._models[name] = self._models.pop(name)  # keep the order of the new configuration
        if is_reload:
            self._manager.reconcile_soon()

    def _update_spec(self, model: PooledModel, new: EngineSpec) -> None:
        """The engine stays the same; only how it is run changes. What made it fail may have been corrected elsewhere,
        in its files or its template."""
        if model.is_failed:
            model.is_failed, model.reason, model.desired, model.overrides = False, "", new.replicas, {}
            model.need = self._memory_planner.unknown
        if model.desired and new.replicas != model.spec.replicas:
            model.desired = new.replicas
        model.spec = new
        if not model.overrides:
            model.active_spec = new
            for replica in model.replicas:
                replica.update_spec(new)

    def cancel(self, trace: str) -> int:
        found = [lease for lease in self._leases if trace and lease.request.trace == trace]
        error = Cancelled(BY_ADMINISTRATOR)
        for lease in found:
            if lease.is_waiting:
                self.leave_queue(lease)
                lease.refuse(error)
            else:
                lease.revoke(error)
        return len(found)

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """By the name of an API key. A key with unchanged limits keeps its usage."""
        now, old = self._now(), self._rate_limiters
        self._rate_limiters = {
            key: old[key] if key in old and old[key].limits == new else KeyRateLimiter(key, new, now)
            for key, new in limits.items()
        }

    def _get(self, name: str) -> PooledModel:
        if self._closed:
            raise _shutting_down()
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"unknown model {name!r}", code="model_not_found")
        return model

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        await self._manager.close(_shutting_down())


def _request_snapshot(lease: SlotLease, clock: Clock) -> RequestSnapshot:
    request, age = lease.request, clock.now() - lease.since
    return RequestSnapshot(
        trace=request.trace,
        model=lease.model.name,
        cache=request.cache,
        state="running" if lease.granted else "waiting",
        key=request.key,
        session=request.session,
        priority=request.priority,
        tokens=request.tokens,
        weight=lease.weight,
        position=lease.position,
        replica=None if lease.replica is None else lease.replica.id,
        since=clock.unix() - age,
        waited=lease.waited if lease.granted else age,
    )


def _device_snapshots(hard: DeviceBytes, held: Iterable[DeviceBytes]) -> tuple[DeviceSnapshot, ...]:
    taken: dict[str, int] = dict.fromkeys(hard, 0)
    for each in held:
        for device, amount in each.items():
            taken[device] = taken.get(device, 0) + amount
    return tuple(DeviceSnapshot(device, hard.get(device), amount) for device, amount in taken.items())


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="shutting_down")
