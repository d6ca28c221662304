"""One model's record: its lanes, its replicas, what is wanted of it, and who takes the next request.

The way of a request goes through `seat` alone. It is not a function of a snapshot of the pool: making one would cost
more than all the rest. What it looks at is kept current instead: the lane's length and each replica's free places.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from modelyard.core.engine import Capabilities, MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.core.lease import LeaseRequest, ModelState, ModelStatus
from modelyard.core.pool import ModelSpec
from modelyard.scheduler.affinity import ReplicaAffinity, prefix_hashes
from modelyard.scheduler.clock import TimerHandle
from modelyard.scheduler.lease import SlotLease
from modelyard.scheduler.memory_planner import DeviceBytes, bytes_on_node
from modelyard.scheduler.policy import ModelView
from modelyard.scheduler.queue import RequestQueue
from modelyard.scheduler.replica import Replica


class SchedulerOptions(Struct, frozen=True):
    """How many may wait a cache, how many prompt tokens in all, how long for a lost engine, how long at all; how long a
    load may take; and when a loaded model has to make room for one that is not (see `policy.py`)."""

    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    timeout: float = 30.0
    max_wait_s: float | None = None
    load_timeout_s: float = 1800.0
    patience_s: float = 10.0
    linger_s: float = 1.0


class PendingCommand(Struct, frozen=True):
    """What an administrator waits for. `loads`: it asks for replicas, as a waiting request does."""

    done: Future[None]
    since: float
    met: Callable[[], bool]
    loads: bool = False


class PooledModel:
    """`sleeping`: the pool itself stopped it, and the next request for it loads it. `drained`: it takes no requests.
    `retired`: a reload has replaced it. `down_since` is set while engines that were up are away."""

    def __init__(self, key: str, blueprint: ModelSpec, bounds: SchedulerOptions) -> None:
        self.key, self.name, self.blueprint, self.current = key, blueprint.name, blueprint, blueprint
        self.lanes: dict[str, RequestQueue[SlotLease]] = {
            cache: RequestQueue(bounds.max_waiting, bounds.max_waiting_tokens) for cache in blueprint.caches
        }
        self.replicas: list[Replica] = []
        self.up: list[Replica] = []  # those that take requests
        self.orders: list[PendingCommand] = []
        self.overrides: Mapping[str, Any] = {}
        self.running = self.wanted = self.loads = self.evictions = self.failures = 0
        self.sleeping = self.drained = self.retired = self.failed = self.surveying = False
        self.failed_at = 0.0
        self.reason = ""
        self.down_since: float | None = None
        self.used: float | None = None  # when its last answer ended
        self.need: DeviceBytes | None = None if blueprint.estimate is not None else {}
        self.abroad: Mapping[str, DeviceBytes] = {}  # what it takes on other machines
        self.estimate: MemoryEstimate | None = None
        self.measured: int | None = None
        self.load_s: float | None = None
        self.ttl_timer: TimerHandle | None = None
        self.told: object = None  # what the last Change said
        self._affinity = ReplicaAffinity()

    def __repr__(self) -> str:
        return f"{self.name}: {self.state}, {self.running} running, {self.waiting} waiting"

    # --- the way of a request --------------------------------------------------------------------------------------

    def weight(self, cache: str, wanted: int) -> int:
        """No more than one replica can give at a time, and never less than one."""
        most = self.current.caches[cache].parallel
        if self.current.target_inflight is not None:
            most = min(most, self.current.target_inflight)
        return max(1, min(wanted, most))

    def seat(self, demand: LeaseRequest, weight: int) -> Replica | None:
        """The replica in which places were taken, if one has room. Nobody may stand in front."""
        up = self.up
        replica = up[0] if len(up) == 1 else self._choose(demand, weight)
        if replica is None or not replica.take(demand.cache, weight):
            return None
        self.running += weight
        return replica

    def _choose(self, demand: LeaseRequest, weight: int) -> Replica | None:
        """Of several."""
        candidates = [one for one in self.up if one.has_room(demand.cache, weight)]
        if not candidates:
            return None
        prefix = prefix_hashes(demand.prompt)
        chosen = self._affinity.choose(demand.session, prefix, candidates)
        self._affinity.remember(demand.session, prefix, chosen.id)
        return chosen

    def admit(self, lane: RequestQueue[SlotLease], now: float) -> None:
        """Everybody of this lane who may start now."""
        while (head := lane.head()) is not None and (replica := self.seat(head.demand, head.weight)) is not None:
            head.grant(replica, now)
            lane.pop()

    def admit_all(self, now: float) -> None:
        """Lanes share what `target_inflight` leaves them: whoever has waited longest is asked first."""
        waiting = [lane for lane in self.lanes.values() if lane.waiting]
        for lane in sorted(waiting, key=lambda lane: lane.oldest() or 0.0):
            self.admit(lane, now)

    def places(self, cache: str) -> int:
        return max(1, len(self.up)) * self.weight(cache, 2**31)

    def refuse_all(self, error: ModelyardError) -> list[SlotLease]:
        gone = [place for lane in self.lanes.values() for place in lane.clear()]
        for place in gone:
            place.refuse(error)
        return gone

    # --- what it looks like ----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes.values())

    @property
    def waiting_tokens(self) -> int:
        return sum(lane.waiting_tokens for lane in self.lanes.values())

    @property
    def wakes(self) -> bool:
        return self.blueprint.autoload or self.sleeping or self.retired

    @property
    def target(self) -> int:
        """How many replicas it should have now. One that sleeps should have some only while somebody waits."""
        if self.retired:
            staying = sum(one.state not in ("draining", "closing") for one in self.replicas)
            return max(1, staying) if self.waiting else staying if self.running else 0
        if self.wanted or not (self.wakes and self.waiting) or self.failed:
            return self.wanted
        return self.blueprint.replicas

    @property
    def asked_since(self) -> float | None:
        times = [oldest for lane in self.lanes.values() if (oldest := lane.oldest()) is not None]
        return min((*times, *(order.since for order in self.orders if order.loads)), default=None)

    @property
    def state(self) -> ModelState:
        if self.failed:
            return "failed"
        if self.drained and self.replicas:
            return "draining"
        if self.up:
            return "ready"
        if self.target:
            return "loading"
        return "draining" if self.replicas else "stopped"

    @property
    def busiest(self) -> Replica | None:
        """The replica whose progress stands for the model's: of those that are not up, the furthest."""
        away = [one for one in self.replicas if one.state in ("placing", "loading", "restarting")]
        return max(away, key=lambda one: one.progress, default=None)

    @property
    def progress(self) -> float:
        return 1.0 if self.up else self.busiest.progress if self.busiest else 0.0

    @property
    def doing(self) -> str:
        return "" if self.up or self.busiest is None else self.busiest.doing

    @property
    def capabilities(self) -> Capabilities:
        engine = next((one.engine for one in self.up if one.engine is not None), None)
        return engine.info.capabilities if engine is not None else Capabilities()

    @property
    def status(self) -> ModelStatus:
        state = self.state
        return ModelStatus(
            state,
            self.running,
            self.waiting,
            self.reason,
            self.doing,
            self.progress,
            self.capabilities,
            state == "stopped" and self.wakes,
        )

    def need_at(self, site: str) -> DeviceBytes:
        return bytes_on_node(site, self.need, self.abroad)

    @property
    def view(self) -> ModelView:
        return ModelView(
            name=self.key,
            wanted=self.target,
            asked_since=self.asked_since,
            need=self.need,
            replicas=tuple(one.view for one in self.replicas),
            waiting=self.waiting,
            load_s=self.load_s or 1.0,
            idle_ttl_s=self.blueprint.idle_ttl_s,
            abroad=self.abroad,
        )
