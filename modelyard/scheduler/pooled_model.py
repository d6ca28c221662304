"""One model of the pool: its requests (leases), its replicas, and which replica takes the next request.

A request to a ready model only goes through `assign`. It does not use a snapshot of the pool, which would cost more
than everything else; the queue length and the free slots of each replica are kept up to date instead.

`Replica` is the life of an engine, and its slots. It reports events; the replica manager decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Capabilities, Engine, EngineSpec, MemoryEstimate
from modelyard.core.errors import Cancelled, Internal, ModelyardError, Timeout
from modelyard.core.pool import (
    Lease,
    LeaseRequest,
    ModelState,
    ModelStatus,
    ReplicaSnapshot,
    ReplicaState,
    RevocableLease,
)
from modelyard.core.request import Priority
from modelyard.scheduler.memory_planner import DeviceBytes, MemoryMeter, bytes_on_node
from modelyard.scheduler.queue import RequestQueue
from modelyard.scheduler.rate_limit import KeyRateLimiter
from modelyard.scheduler.settings import SchedulerOptions

if TYPE_CHECKING:
    from modelyard.scheduler.replica_manager import ReplicaManager
    from modelyard.scheduler.scheduler import Scheduler


log = logging.getLogger(__name__)


# --- replicas ---------------------------------------------------------------------------------------------------------


class Replica:
    """`granted` counts the requests of the current engine. `load_growth` is how much memory opening it took; it is
    valid while `allocation` is the planner's latest. `node` is the chosen machine, "" this one."""

    def __init__(
        self,
        id: int,
        model: str,
        spec: EngineSpec,
        observer: ReplicaManager,
        *,
        load_timeout_s: float,
        meter: MemoryMeter | None = None,
    ) -> None:
        self.id, self.model, self.spec = id, model, spec
        self.state: ReplicaState = "reserved"
        self.progress, self.phase, self.reason = 0.0, "", ""
        self.since = self.load_started = self.ready_since = self.idle_since = 0.0
        self.restarts = self.running = self.granted = self.allocation = 0
        self.evicting = False
        self.node = ""
        self.bytes: DeviceBytes = {}
        self.load_growth: DeviceBytes | None = None
        self.engine: Engine | None = None
        self._observer, self._load_timeout_s, self._meter = observer, load_timeout_s, meter
        self._life: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closing_engine: asyncio.Task[None] | None = None
        self._reset_slots()

    # --- slots -----------------------------------------------------------------------------------------------------

    def _reset_slots(self) -> None:
        """All slots of a new engine are free, even if leases of the old engine are still held."""
        self.running = self.granted = 0
        self.free_slots = {name: cache.parallel for name, cache in self.spec.caches.items()}
        self.max_running = _max_running(self.spec)

    def update_spec(self, spec: EngineSpec) -> None:
        """The same engine with other limits. Running requests stay, even if the new limit is lower."""
        self.max_running = _max_running(spec)
        self.spec = spec

    def free(self, cache: str) -> int:
        return min(self.free_slots.get(cache, 0), self.max_running - self.running)

    def has_room(self, cache: str, weight: int) -> bool:
        """A lost engine has no room: its requests learn of the loss, and are retried, before this replica does."""
        if weight > self.free(cache):
            return False
        return self.engine is not None and not self.engine.lost.done()

    def acquire(self, cache: str, weight: int) -> bool:
        if not self.has_room(cache, weight):
            return False
        self.free_slots[cache] -= weight
        self.running += weight
        self.granted += 1
        return True

    def release(self, cache: str, weight: int, engine: Engine, now: float) -> None:
        if engine is not self.engine:  # the slots went with the old engine
            return
        self.free_slots[cache] += weight
        self.running -= weight
        if not self.running:
            self.idle_since = now

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self.state in ("draining", "closing")

    @property
    def pid(self) -> int | None:
        pid: Any = getattr(self.engine, "pid", None)
        return pid if isinstance(pid, int) else None

    def update_node(self) -> bool:
        """Record where the engine is open. Returns whether that differs from the chosen node."""
        actual: Any = getattr(self.engine, "node", None)
        chosen, self.node = self.node, actual if isinstance(actual, str) else self.node
        return chosen != self.node

    def start(self) -> None:
        self.state, self.progress, self.phase = "loading", 0.0, ""
        self._life = asyncio.get_running_loop().create_task(self._live())

    def close(self) -> None:
        """Abort whatever it does. `on_closed` is called when its engine is closed."""
        self.state = "closing"
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def wait_closed(self) -> None:
        if self._closing is not None:
            await self._closing

    async def _live(self) -> None:
        try:
            before = await self._read_meter()
            if self._observer.check is not None:
                await asyncio.to_thread(self._observer.check, self.spec)
            engine = self.engine = self._observer.create(self.spec, self.node)
            async with asyncio.timeout(self._load_timeout_s):
                await engine.open(self._on_progress)
            after = await self._read_meter()
        except Exception as error:
            await self._close_engine()
            self._observer.on_load_failed(self, self._to_modelyard_error(error))
            return
        if before is not None and after is not None:
            self.load_growth = {device: max(0, used - before.get(device, 0)) for device, used in after.items()}
        self._reset_slots()
        self._observer.on_ready(self)
        loss = await asyncio.shield(engine.lost)
        await self._close_engine()
        self._observer.on_lost(self, loss)

    def _to_modelyard_error(self, error: Exception) -> ModelyardError:
        if isinstance(error, ModelyardError):
            return error
        if isinstance(error, TimeoutError):
            return Timeout(f"loading took longer than {self._load_timeout_s:g} s (scheduler.load_timeout_s)")
        log.error("loading a model failed", exc_info=error)
        return Internal(f"{type(error).__name__}: {error}", id="load")

    async def _read_meter(self) -> DeviceBytes | None:
        return None if self._meter is None else await asyncio.to_thread(self._meter)

    def _on_progress(self, done: float, phase: str) -> None:
        self.progress, self.phase = done, phase
        self._observer.on_progress(self)

    async def _close_engine(self) -> None:
        """In a separate task, so that cancelling the caller does not leave the engine half closed."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self._closing_engine = asyncio.get_running_loop().create_task(_close_quietly(engine))
        if self._closing_engine is not None:
            await asyncio.shield(self._closing_engine)

    async def _close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
            self._life = None  # the traceback of its cancellation refers to the engine
        await self._close_engine()
        self._observer.on_closed(self)


def _max_running(spec: EngineSpec) -> int:
    return spec.target_inflight or sum(cache.parallel for cache in spec.caches.values())


async def _close_quietly(engine: Engine) -> None:
    """A failing close must not prevent the next open."""
    try:
        await engine.close()
    except Exception:
        log.exception("closing an engine failed")


# --- time -------------------------------------------------------------------------------------------------------------


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """Time, and timers on the event loop. Tests have one of their own."""

    now = staticmethod(time.monotonic)
    unix = staticmethod(time.time)

    def call_later(self, delay: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, delay), callback)


# --- affinity -------------------------------------------------------------------------------------------------------

_PREFIX_LENGTHS = (4096, 512, 64)  # hashed prefixes in tokens, longest first
_MAX_EXTRA_LOAD = 2  # a known prefix is preferred up to this many running requests above the least busy replica
_MAX_ENTRIES = 8192


def prefix_hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Hashes of the prompt's prefixes, longest first. A collision costs a cache hit, never correctness."""
    return tuple(hash(tuple(prompt[:length])) for length in _PREFIX_LENGTHS if len(prompt) >= length)


class ReplicaAffinity:
    """The replica for a request: the one that served its session, else its prefix, else the least busy. Pure.

    Replicas do not share KV caches, so a conversation is cheap only on the replica that served it before. Two LRU maps
    hold replica ids; ids are never reused, so entries of dead replicas are harmless.
    """

    def __init__(self, size: int = _MAX_ENTRIES) -> None:
        self._size = size
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, session: str | None, prefixes: tuple[int, ...], candidates: Sequence[Replica]) -> Replica:
        """`candidates` must not be empty."""
        least_busy = min(candidates, key=lambda replica: (replica.running, replica.id))
        by_id = {replica.id: replica for replica in candidates}
        if session is not None and (known := by_id.get(self._sessions.get(session, 0))) is not None:
            return known
        for prefix in prefixes:
            known = by_id.get(self._prefixes.get(prefix, 0))
            if known is not None and known.running <= least_busy.running + _MAX_EXTRA_LOAD:
                return known
        return least_busy

    def record(self, session: str | None, prefixes: tuple[int, ...], replica: int) -> None:
        if session is not None:
            self._put(self._sessions, session, replica)
        for prefix in prefixes:
            self._put(self._prefixes, prefix, replica)

    def _put(self, entries: OrderedDict[Hashable, int], key: Hashable, replica: int) -> None:
        entries[key] = replica
        entries.move_to_end(key)
        if len(entries) > self._size:
            entries.popitem(last=False)


# --- leases ---------------------------------------------------------------------------------------------------------


class SlotLease(RevocableLease, eq=False):
    """One request: a `Ticket` while it waits, a `Lease` while it runs. Granted at once if a slot is free."""

    _scheduler: Scheduler
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
    future: asyncio.Future[None] | None = None  # while it waits

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

    def grant(self, replica: Replica, now: float) -> None:
        self.replica, self.engine, self.granted = replica, replica.engine, True
        self.waited = now - self.since
        self._cancel_timer()
        if self.future is not None:
            self.future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        """The lease must have left its queue."""
        self.is_finished = True
        self._cancel_timer()
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # mark it retrieved: the client may have disconnected

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def lease(self) -> Lease:
        if self.replica is None and self.future is not None:
            await asyncio.shield(self.future)
        if self.replica is None:
            raise _cancelled()
        return self

    def cancel(self) -> None:
        if self.replica is not None:
            self.release()
        elif not self.is_finished:
            self._scheduler.leave_queue(self)
            self.refuse(_cancelled())

    # --- Lease -----------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> str:
        return self.request.cache

    def spend(self, tokens: int) -> None:
        if self.rate_limiter is not None:
            self._scheduler.on_tokens_spent(self.rate_limiter, tokens)

    def release(self) -> None:
        if not self.is_finished and self.replica is not None:
            self.is_finished = True
            self._revokers = ()
            self._scheduler.on_released(self)


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled while it waited")


# --- the model ------------------------------------------------------------------------------------------------------


class PendingCommand(Struct, frozen=True):
    """An administrator's command that waits for its result. `loads`: it needs replicas, as a waiting request does."""

    done: asyncio.Future[None]
    since: float
    is_complete: Callable[[], bool]
    loads: bool = False


class PooledModel:
    """`active_spec` is `spec` with the overrides of the current load. `is_sleeping`: the pool stopped it, and the next
    request loads it. `is_draining`: it takes no requests. `is_retired`: a reload has replaced it. `down_since` is set
    while all engines that were ready are lost."""

    def __init__(self, key: str, spec: EngineSpec, options: SchedulerOptions) -> None:
        self.key, self.name, self.spec, self.active_spec = key, spec.model, spec, spec
        self.queues: dict[str, RequestQueue[SlotLease]] = {
            cache: RequestQueue(options.max_waiting, options.max_waiting_tokens) for cache in spec.caches
        }
        self.replicas: list[Replica] = []
        self.ready: list[Replica] = []  # the replicas that take requests
        self.commands: list[PendingCommand] = []
        self.overrides: Mapping[str, Any] = {}
        self.running = self.desired = self.loads = self.evictions = self.failures = 0
        self.is_sleeping = self.is_draining = self.is_retired = self.is_failed = self.is_estimating = False
        self.failed_at = 0.0
        self.reason = ""
        self.down_since: float | None = None
        self.last_used: float | None = None  # when its last request ended
        self.need: DeviceBytes | None = None
        self.need_by_node: Mapping[str, DeviceBytes] = {}
        self.estimate: MemoryEstimate | None = None
        self.measured: int | None = None
        self.load_s: float | None = None
        self.keep_alive: float | None = None  # of the last request; None: the settings' idle time applies
        self.ttl_timer: TimerHandle | None = None
        self.ttl_timer_s = 0.0
        self.published: object = None  # contents of the last ModelStateChange
        self._affinity = ReplicaAffinity()

    def __repr__(self) -> str:
        return f"{self.name}: {self.state}, {self.running} running, {self.waiting} waiting"

    # --- the path of a request -------------------------------------------------------------------------------------

    def weight(self, cache: str, wanted: int) -> int:
        """At most what one replica can run at a time, at least one."""
        limit = self.active_spec.caches[cache].parallel
        if self.active_spec.target_inflight is not None:
            limit = min(limit, self.active_spec.target_inflight)
        return max(1, min(wanted, limit))

    def assign(self, request: LeaseRequest, weight: int) -> Replica | None:
        """Acquire slots in a replica with room. The caller makes sure that no other request is ahead."""
        ready = self.ready
        replica = ready[0] if len(ready) == 1 else self._choose(request, weight)
        if replica is None or not replica.acquire(request.cache, weight):
            return None
        self.running += weight
        self.queues[request.cache].slots.start(request.key, weight)
        return replica

    def _choose(self, request: LeaseRequest, weight: int) -> Replica | None:
        candidates = [replica for replica in self.ready if replica.has_room(request.cache, weight)]
        if not candidates:
            return None
        prefixes = prefix_hashes(request.prompt)
        chosen = self._affinity.choose(request.session, prefixes, candidates)
        self._affinity.record(request.session, prefixes, chosen.id)
        return chosen

    def may_start(self, lease: SlotLease, now: float) -> bool:
        """Whether enough slots stay free for other keys if it starts. A retry had a slot before."""
        request, queue = lease.request, lease.queue
        idle = queue.slots.idle
        if request.is_retry or not idle or (len(idle) == 1 and request.key in idle):
            return True
        kept = queue.kept(request.key, self.slots(request.cache), now)
        return not kept or sum(replica.free(request.cache) for replica in self.ready) - lease.weight >= kept

    def admit(self, queue: RequestQueue[SlotLease], now: float) -> None:
        """Grant every lease of this queue that may start now."""
        may_start = partial(self.may_start, now=now)
        while (head := queue.head(may_start)) is not None and (replica := self.assign(head.request, head.weight)):
            head.grant(replica, now)
            queue.pop(head)

    def admit_all(self, now: float) -> None:
        """The queues share `target_inflight`: the one with the oldest waiter goes first."""
        waiting = [queue for queue in self.queues.values() if queue.waiting]
        for queue in sorted(waiting, key=lambda queue: queue.oldest() or 0.0):
            self.admit(queue, now)

    def slots(self, cache: str) -> int:
        return max(1, len(self.ready)) * self.weight(cache, 2**31)

    def refuse_all(self, error: ModelyardError) -> list[SlotLease]:
        removed = [lease for queue in self.queues.values() for lease in queue.clear()]
        for lease in removed:
            lease.refuse(error)
        return removed

    # --- its state -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum(queue.waiting for queue in self.queues.values())

    @property
    def waiting_tokens(self) -> int:
        return sum(queue.waiting_tokens for queue in self.queues.values())

    @property
    def waiting_since(self) -> float | None:
        times = (queue.oldest() for queue in self.queues.values())
        return min((since for since in times if since is not None), default=None)

    @property
    def loads_on_request(self) -> bool:
        return self.spec.autoload or self.is_sleeping or self.is_retired

    @property
    def target(self) -> int:
        """How many replicas it should have now. A sleeping model should have some only while requests wait."""
        if self.is_retired:
            staying = sum(not replica.is_stopping for replica in self.replicas)
            return max(1, staying) if self.waiting else staying if self.running else 0
        if self.desired or not (self.loads_on_request and self.waiting) or self.is_failed:
            return self.desired
        return self.spec.replicas

    @property
    def wanted_since(self) -> float | None:
        times = [command.since for command in self.commands if command.loads]
        if (oldest := self.waiting_since) is not None:
            times.append(oldest)
        return min(times, default=None)

    @property
    def state(self) -> ModelState:
        if self.is_failed:
            return "failed"
        if self.is_draining and self.replicas:
            return "draining"
        if self.ready:
            return "ready"
        if self.target:
            return "loading"
        return "draining" if self.replicas else "stopped"

    @property
    def _furthest(self) -> Replica | None:
        """The replica whose progress is shown: of those that load, the one that has come furthest."""
        loading = [one for one in self.replicas if one.state in ("reserved", "loading", "restarting")]
        return max(loading, key=lambda one: one.progress, default=None)

    @property
    def progress(self) -> float:
        if self.ready:
            return 1.0
        return replica.progress if (replica := self._furthest) is not None else 0.0

    @property
    def phase(self) -> str:
        return "" if self.ready or (replica := self._furthest) is None else replica.phase

    @property
    def capabilities(self) -> Capabilities:
        engine = next((replica.engine for replica in self.ready if replica.engine is not None), None)
        return engine.info.capabilities if engine is not None else Capabilities()

    @property
    def status(self) -> ModelStatus:
        state = self.state
        return ModelStatus(
            name=self.name,
            state=state,
            running=self.running,
            waiting=self.waiting,
            reason=self.reason,
            phase=self.phase,
            progress=self.progress,
            capabilities=self.capabilities,
            loads_on_request=state == "stopped" and self.loads_on_request and not self.spec.is_faulty,
        )

    def need_on(self, node: str) -> DeviceBytes:
        return bytes_on_node(node, self.need, self.need_by_node)

    @property
    def idle_ttl_s(self) -> float | None:
        """Seconds without a request after which it is unloaded; None: never."""
        if self.keep_alive is None:
            return self.spec.idle_ttl_s
        return None if self.keep_alive == math.inf else self.keep_alive

    def snapshot(self, clock: Clock) -> ModelStatus:
        now, oldest = clock.now(), self.waiting_since
        service_times = [queue.service_s for queue in self.queues.values() if queue.service_s is not None]
        return replace(
            self.status,
            waiting_tokens=self.waiting_tokens,
            slots=sum(replica.max_running for replica in self.ready),
            replicas=tuple(_replica_snapshot(replica) for replica in self.replicas),
            replicas_wanted=self.desired,
            replica_max=self.spec.replica_max,
            target_inflight=self.spec.target_inflight,
            autoload=self.spec.autoload,
            idle_ttl_s=self.idle_ttl_s,
            caches=self.active_spec.caches,
            overrides=self.overrides,
            estimate=self.estimate,
            measured=self.measured,
            load_s=self.load_s,
            loads=self.loads,
            failures=self.failures,
            evictions=self.evictions,
            last_used=None if self.last_used is None else clock.unix() - (now - self.last_used),
            service_s=sum(service_times) / len(service_times) if service_times else None,
            wait_s=None if oldest is None else now - oldest,
        )


def _replica_snapshot(replica: Replica) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        id=replica.id,
        state=replica.state,
        running=replica.running,
        since=replica.since,
        progress=replica.progress,
        phase=replica.phase,
        reason=replica.reason,
        pid=replica.pid,
    )
