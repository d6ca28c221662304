"""What should be loaded: `plan(view, now)` looks at the whole pool and returns actions. Pure.

It runs whenever something may have changed what should be loaded, never in the path of a request to a ready model. Such
a request only looks at its own queue and its model's replicas (`pooled_model.py`), so 64 models and 1,000 waiters cost
it nothing. The same pool at the same time gets the same plan, whatever event led to it.

    1. surplus      more replicas than the target → stop: reserved ones first, then idle, then the least busy
    2. idle         nothing runs or waits for longer than the TTL → sleep
    3. missing      fewer replicas than the target; reservations first, then by waiting time, then models without
                    waiters. With several nodes each step tries one after the other, in order of preference
       3.1 a replica drains for a reservation that is gone      → keep it
       3.2 its memory need is unknown                           → estimate
       3.3 it exceeds the limit even alone                      → reject; if it is up, do without the extra replica
       3.4 it fits the free memory                              → start
       3.5 nothing waits for it, and other models are loaded    → sleep; if it is up, do without the extra replica
       3.6 it fits when the stopping replicas are gone          → reserve
       3.7 it fits when idle replicas are stopped               → stop the cheapest of them, reserve
       3.8 … and replicas whose turn is over                    → stop the cheapest of both, reserve
       3.9 no limit is configured, and nothing can be stopped   → start, and let the engine find out whether it fits
       3.10 otherwise                                           → wait; plan again when 3.7 or 3.8 may become true

Against thrashing: a replica that has just become idle lingers, because its client is likely to come back (3.7). A turn
ends when a request has waited `patience_s` since the later of its arrival and the replica becoming ready (3.8):
requests are served in groups, a switch costs one load for at least `patience_s` of work, and no request waits for ever.
A busy replica is never closed: it takes no new requests and closes when its last request ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.units import format_size
from modelyard.scheduler.memory_planner import (
    DeviceBytes,
    EvictionCandidate,
    bytes_on_node,
    choose_evictions,
    fits,
    free_bytes,
)
from modelyard.scheduler.pooled_model import PooledModel, Replica

# --- what it decides about ------------------------------------------------------------------------------------------


class PoolView(Struct, frozen=True, kw_only=True):
    """The models and their replicas are read, never changed. `hard` are configured limits. `soft` is what the machine
    seems to have without one: there the engine has the last word on what fits. `nodes` are the machines that may get a
    replica, in order of preference; "" is this one."""

    models: tuple[PooledModel, ...]
    hard: DeviceBytes = field(default_factory=dict)
    soft: DeviceBytes = field(default_factory=dict)
    patience_s: float = 10.0
    linger_s: float = 1.0
    nodes: tuple[str, ...] = ("",)


# --- the actions ----------------------------------------------------------------------------------------------------


class EstimateMemory(Struct, frozen=True):
    model: str


class ReserveMemory(Struct, frozen=True):
    """Memory is being freed for a replica of this model; no other model may take it."""

    model: str
    reason: str = ""


class StartReplica(Struct, frozen=True):
    """Load the reserved replica, or a new one."""

    model: str
    replica: int | None = None
    node: str = ""


class StopReplica(Struct, frozen=True):
    """Give it no more requests and close it when its last request ends. `evict`: to make room for another model."""

    model: str
    replica: int
    evict: bool = False


class KeepReplica(Struct, frozen=True):
    """Its memory is not needed any more: undo its eviction."""

    model: str
    replica: int


class SleepModel(Struct, frozen=True):
    """Stop all replicas until the next request."""

    model: str
    reason: str


class RejectModel(Struct, frozen=True):
    """It cannot be loaded with these limits: refuse the waiting requests."""

    model: str
    error: ModelyardError


PoolAction = EstimateMemory | ReserveMemory | StartReplica | StopReplica | KeepReplica | SleepModel | RejectModel


class PoolPlan(Struct, frozen=True):
    """What to do now, and when to plan again if nothing happens."""

    actions: tuple[PoolAction, ...] = ()
    wake: float | None = None


# --- the decision ---------------------------------------------------------------------------------------------------

_Candidates = list[tuple[PooledModel, Replica]]


def plan(view: PoolView, now: float) -> PoolPlan:
    return _Planner(view, now).plan()


class _Planner:
    """`free` is what is free now, `coming` adds what stopping replicas will give back, `allowed` is what the configured
    limits leave. All three shrink with every start and reservation."""

    def __init__(self, view: PoolView, now: float) -> None:
        self._view, self._now = view, now
        self._actions: list[PoolAction] = []
        self._wakes: list[float] = []
        self._stopped: set[int] = set()
        self._served: set[str] = set()  # models that got memory in this plan
        held = list(self._held())
        self._free = free_bytes({**view.soft, **view.hard}, held)
        self._coming = dict(self._free)
        self._allowed = free_bytes(view.hard, held)
        for model in view.models:
            for replica in model.replicas:
                if replica.is_stopping:
                    self._give_back(replica.bytes)

    def plan(self) -> PoolPlan:
        for model in self._view.models:
            self._stop_surplus(model)  # 1
            self._sleep_if_idle(model)  # 2
        for model in sorted(self._view.models, key=_urgency):
            self._add_missing(model)  # 3
        return PoolPlan(tuple(self._actions), min(self._wakes, default=None))

    # --- 1 and 2 ---------------------------------------------------------------------------------------------------

    def _stop_surplus(self, model: PooledModel) -> None:
        surplus = max(0, len(_staying(model)) - model.target)
        for replica in sorted(_staying(model), key=_stop_order)[:surplus]:
            self._stop(model, replica)

    def _sleep_if_idle(self, model: PooledModel) -> None:
        ttl = model.idle_ttl_s
        if ttl is None or not model.target or model.waiting or model.wanted_since is not None:
            return
        if not _staying(model) or any(replica.state != "ready" or replica.running for replica in _staying(model)):
            return
        due = max(replica.idle_since for replica in _staying(model)) + ttl
        if due > self._now:
            self._wakes.append(due)
            return
        self._actions.append(SleepModel(model.key, f"no requests for {ttl:g} s"))
        for replica in _staying(model):
            self._stopped.add(replica.id)
            self._give_back(replica.bytes)

    # --- 3 ---------------------------------------------------------------------------------------------------------

    def _add_missing(self, model: PooledModel) -> None:
        reserved = [one for one in model.replicas if one.state == "reserved" and one.id not in self._stopped]
        missing = model.target - len(_staying(model)) + len(reserved) - self._keep_drained(model)
        for number in range(missing):
            reservation = reserved[number].id if number < len(reserved) else None
            if not self._add_replica(model, reservation):
                return

    def _keep_drained(self, model: PooledModel) -> int:
        """Undo evictions that no reservation needs; returns how many."""
        if any(r.state == "reserved" and r.id not in self._stopped for m in self._view.models for r in m.replicas):
            return 0
        drained = [one for one in model.replicas if one.state == "draining" and one.evicting]
        kept = drained[: max(0, model.target - len(_staying(model)))]
        for replica in kept:
            self._actions.append(KeepReplica(model.key, replica.id))  # 3.1
            self._take(replica.bytes, self._coming)
        return len(kept)

    def _add_replica(self, model: PooledModel, reservation: int | None) -> bool:
        """Returns whether to look at the model's next missing replica as well."""
        if model.need is None:
            self._actions.append(EstimateMemory(model.key))  # 3.2
            return False
        needs = {node: bytes_on_node(node, model.need, model.need_by_node) for node in self._view.nodes}
        possible = {node: need for node, need in needs.items() if fits(need, self._view.hard)}
        if not possible:
            if not _is_up(model):
                error = _too_large(model.key, needs[self._view.nodes[0]], self._view.hard)
                self._actions.append(RejectModel(model.key, error))  # 3.3
            return False
        for node, need in possible.items():
            if fits(need, self._free):
                self._start(model, need, reservation, node)  # 3.4
                return True
        if model.wanted_since is None and (self._served or any(self._held())):
            if model.key not in self._served and not _is_up(model):
                self._actions.append(SleepModel(model.key, "not enough free memory beside the loaded models"))  # 3.5
            return False
        return self._make_room(model, possible, reservation)

    def _make_room(self, model: PooledModel, needs: Mapping[str, DeviceBytes], reservation: int | None) -> bool:
        for need in needs.values():
            if fits(need, self._coming):
                self._reserve(model, need, reservation)  # 3.6
                return True
        others = [
            (m, r)
            for m in self._view.models
            if m.key != model.key
            for r in m.replicas
            if r.state == "ready" and r.id not in self._stopped
        ]
        idle = [(m, r) for m, r in others if _is_idle(m, r) and r.idle_since + self._view.linger_s <= self._now]
        overdue = [(m, r) for m, r in others if not _is_idle(m, r) and self._turn_end(r, model) <= self._now]
        for candidates in (idle, idle + overdue):  # 3.7, 3.8
            for need in needs.values():
                if (chosen := self._choose_evictions(need, candidates)) is not None:
                    for other, replica in candidates:
                        if replica.id in chosen:
                            self._stop(other, replica, evict=True)
                    self._reserve(model, need, reservation)
                    return True
        possible = any(self._choose_evictions(need, others) is not None for need in needs.values())
        allowed = next((node for node, need in needs.items() if fits(need, self._allowed)), None)
        if not possible and allowed is not None and not self._is_changing():
            self._start(model, needs[allowed], reservation, allowed)  # 3.9
            return True
        for other, replica in others:  # 3.10
            is_idle = _is_idle(other, replica)
            due = replica.idle_since + self._view.linger_s if is_idle else self._turn_end(replica, model)
            if due > self._now:
                self._wakes.append(due)
        return False

    def _choose_evictions(self, need: DeviceBytes, candidates: _Candidates) -> tuple[int, ...] | None:
        return choose_evictions(need, self._coming, [_eviction_candidate(m, r, self._now) for m, r in candidates])

    def _is_changing(self) -> bool:
        """A replica loads, restarts or stops, so the free memory is about to change."""
        states = (replica.state for model in self._view.models for replica in model.replicas)
        return bool(self._stopped or self._served) or any(state not in ("ready", "reserved") for state in states)

    def _held(self) -> Iterator[DeviceBytes]:
        return (one.bytes for model in self._view.models for one in model.replicas if one.state != "reserved")

    def _turn_end(self, replica: Replica, waiting: PooledModel) -> float:
        return max(waiting.wanted_since or 0.0, replica.ready_since) + self._view.patience_s

    # --- actions and their effect on the next decision -------------------------------------------------------------

    def _start(self, model: PooledModel, need: DeviceBytes, reservation: int | None, node: str) -> None:
        self._actions.append(StartReplica(model.key, reservation, node))
        self._serve(model, need)

    def _reserve(self, model: PooledModel, need: DeviceBytes, reservation: int | None) -> None:
        if reservation is None:
            self._actions.append(ReserveMemory(model.key, "waiting for memory"))
        self._serve(model, need)

    def _serve(self, model: PooledModel, need: DeviceBytes) -> None:
        self._served.add(model.key)
        self._take(need, self._free, self._coming, self._allowed)

    def _stop(self, model: PooledModel, replica: Replica, *, evict: bool = False) -> None:
        self._actions.append(StopReplica(model.key, replica.id, evict))
        self._stopped.add(replica.id)
        if replica.state != "reserved":
            self._give_back(replica.bytes)

    def _give_back(self, held: DeviceBytes) -> None:
        for device, amount in held.items():
            if device in self._coming:
                self._coming[device] += amount

    def _take(self, need: DeviceBytes, *budgets: dict[str, int]) -> None:
        for budget in budgets:
            for device, amount in need.items():
                if device in budget:
                    budget[device] -= amount


def _staying(model: PooledModel) -> list[Replica]:
    return [replica for replica in model.replicas if not replica.is_stopping]


def _is_up(model: PooledModel) -> bool:
    """A replica beyond a reservation stays."""
    return any(replica.state != "reserved" for replica in _staying(model))


def _urgency(model: PooledModel) -> tuple[bool, float]:
    """Models with a reservation come first: the memory freed for them is theirs."""
    has_reservation = any(replica.state == "reserved" for replica in model.replicas)
    return not has_reservation, model.wanted_since if model.wanted_since is not None else float("inf")


def _stop_order(replica: Replica) -> tuple[int, int, int]:
    order = {"reserved": 0, "restarting": 1, "loading": 2, "ready": 3}
    return order.get(replica.state, 3), replica.running, -replica.id


def _is_idle(model: PooledModel, replica: Replica) -> bool:
    return not replica.running and not model.waiting


def _eviction_candidate(model: PooledModel, replica: Replica, now: float) -> EvictionCandidate:
    return EvictionCandidate(
        id=replica.id,
        bytes=replica.bytes,
        load_s=model.load_s or 1.0,
        idle_s=now - replica.idle_since if _is_idle(model, replica) else 0.0,
        has_siblings=len(_staying(model)) > 1,
    )


def _too_large(name: str, need: DeviceBytes, hard: DeviceBytes) -> InvalidRequest:
    device = next(d for d, amount in need.items() if d in hard and amount > hard[d])
    setting = "memory_limit" if device.partition("@")[0] == "cpu" else "gpu_memory_limit"
    needed, limit = format_size(need[device]), format_size(hard[device])
    return InvalidRequest(
        f"the model {name!r} needs about {needed} and the limit is {limit}; raise {setting} under [scheduler], or take "
        "a smaller n_ctx or parallel",
        code="model_too_large",
    )
