"""What should be loaded: `plan(view, now)` looks at the whole pool and says what to do. Pure.

It is asked whenever something may have changed what should be loaded, never on the way of a request to a model that is
up: such a request costs a look at its own lane and its model's replicas (`model.py`), so that 64 models and 1,000
waiters cost it nothing. Nor does it matter which event led here: the same pool at the same time gets the same plan.

    1. surplus      more replicas than wanted → stop: the claimed first, then the idle, then the least busy
    2. idle         nobody runs or waits, for longer than its TTL → sleep
    3. hungry       fewer than wanted; claims first, then by how long somebody has waited, then those nobody asked for.
                    Where it may go on several machines, each step looks at one after the other, the first choice first
       3.1 one drains for a claim that is gone        → keep it
       3.2 its need is not known                      → survey
       3.3 more than the limit alone                  → reject; if it is up already, go without the extra replica
       3.4 it fits into what is free                  → start
       3.5 nobody waits for it, and others are here   → sleep; if it is up already, go without the extra replica
       3.6 it fits when those who leave have left     → claim
       3.7 it fits when idle ones leave               → stop the cheapest of them, claim
       3.8 and when those leave whose turn is over    → stop the cheapest of both, claim
       3.9 no limit is set, and nobody could leave    → start, and let the engine say whether it fits
       3.10 otherwise                                 → it waits; look again when 3.7 or 3.8 may become true

Against thrashing: a replica that has just become idle lingers, because its client is likely to come back (3.7). A turn
ends when somebody has waited `patience_s` since the later of his coming and the replica's being ready (3.8): requests
are served in groups, a switch costs one load for at least `patience_s` of work, and nobody waits for ever.
A busy replica is never closed: it takes no new requests and ends when its last answer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.pool import ReplicaState
from modelyard.scheduler.memory_planner import (
    DeviceBytes,
    EvictionCandidate,
    bytes_on_node,
    choose_evictions,
    fits,
    free_bytes,
)

# The pool as the policy sees it: plain values, made anew for each look.


class ReplicaView(Struct, frozen=True, kw_only=True):
    id: int
    state: ReplicaState
    bytes: DeviceBytes = field(default_factory=dict)
    running: int = 0
    ready_since: float = 0.0
    idle_since: float = 0.0  # of a ready one: when its last answer ended, or since it is ready
    evicting: bool = False  # drains to make room for another model

    @property
    def is_leaving(self) -> bool:
        return self.state in ("draining", "closing")


class ModelView(Struct, frozen=True, kw_only=True):
    """`wanted` is how many replicas it should have now; `asked_since` since when somebody waits for it: a request or
    an administrator. `need` is what one more replica takes; None: nobody has looked yet. `abroad` is what it takes on
    other machines, by their names, where that is not the same."""

    name: str
    wanted: int = 0
    asked_since: float | None = None
    need: DeviceBytes | None = field(default_factory=dict)
    replicas: tuple[ReplicaView, ...] = ()
    waiting: int = 0
    load_s: float = 1.0
    idle_ttl_s: float | None = None
    abroad: Mapping[str, DeviceBytes] = field(default_factory=dict)

    def need_at(self, site: str) -> DeviceBytes:
        return bytes_on_node(site, self.need, self.abroad)

    @property
    def staying(self) -> tuple[ReplicaView, ...]:
        return tuple(one for one in self.replicas if not one.is_leaving)


class PoolView(Struct, frozen=True, kw_only=True):
    """`hard` are bytes that were set as limits; `soft` what the machine seems to have where none was set: there an
    engine has the last word on what fits. `sites` are the machines on which a replica may go, the first choice first;
    the devices of all but this one are told apart by their machine's name."""

    models: tuple[ModelView, ...]
    hard: DeviceBytes = field(default_factory=dict)
    soft: DeviceBytes = field(default_factory=dict)
    patience_s: float = 10.0
    linger_s: float = 1.0
    sites: tuple[str, ...] = ("",)


# --- what is to be done -------------------------------------------------------------------------------------------


class EstimateMemory(Struct, frozen=True):
    """Find out what a replica of it takes."""

    model: str


class ReserveMemory(Struct, frozen=True):
    """Room is being made for a replica of it: nobody else may have it."""

    model: str
    why: str = ""


class StartReplica(Struct, frozen=True):
    """Load a replica: the claimed one, or a new one; on which machine."""

    model: str
    replica: int | None = None
    site: str = ""


class StopReplica(Struct, frozen=True):
    """Give it no more requests, and close it when its last answer has ended. `evict`: to make room for another."""

    model: str
    replica: int
    evict: bool = False


class KeepReplica(Struct, frozen=True):
    """Nobody needs its room any more: it goes on."""

    model: str
    replica: int


class SleepModel(Struct, frozen=True):
    """No replicas until somebody asks for it."""

    model: str
    why: str


class RejectModel(Struct, frozen=True):
    """It can never be loaded like this: those who wait are told."""

    model: str
    error: ModelyardError


PoolAction = EstimateMemory | ReserveMemory | StartReplica | StopReplica | KeepReplica | SleepModel | RejectModel


class PoolPlan(Struct, frozen=True):
    """What to do now, and when to look again even if nothing happens."""

    actions: tuple[PoolAction, ...] = ()
    wake: float | None = None


def plan(view: PoolView, now: float) -> PoolPlan:
    return _Planner(view, now).plan()


class _Planner:
    """One look at the pool. `left` is what is free now, `coming` that and what those give who leave, `allowed` what is
    left of the limits that were set; all shrink with every start and claim."""

    def __init__(self, view: PoolView, now: float) -> None:
        self._view, self._now = view, now
        self._actions: list[PoolAction] = []
        self._wakes: list[float] = []
        self._stopped: set[int] = set()
        self._fed: set[str] = set()  # models that got room in this very plan
        held = [one.bytes for model in view.models for one in model.replicas if one.state != "placing"]
        leaving = [one for model in view.models for one in model.replicas if one.is_leaving]
        self._left = free_bytes({**view.soft, **view.hard}, held)
        self._coming = dict(self._left)
        self._allowed = free_bytes(view.hard, held)
        for one in leaving:
            self._give(one.bytes)

    def plan(self) -> PoolPlan:
        for model in self._view.models:
            self._surplus(model)  # 1
            self._idle(model)  # 2
        for model in sorted(self._view.models, key=_urgency):
            self._feed(model)  # 3
        return PoolPlan(tuple(self._actions), min(self._wakes, default=None))

    # --- 1 and 2 ---------------------------------------------------------------------------------------------------

    def _surplus(self, model: ModelView) -> None:
        extra = len(model.staying) - model.wanted
        for one in sorted(model.staying, key=_dispensable)[: max(0, extra)]:
            self._stop(model, one)

    def _idle(self, model: ModelView) -> None:
        ttl = model.idle_ttl_s
        if ttl is None or not model.wanted or model.waiting or model.asked_since is not None:
            return
        if not model.staying or any(one.state != "ready" or one.running for one in model.staying):
            return
        due = max(one.idle_since for one in model.staying) + ttl
        if due > self._now:
            self._wakes.append(due)
            return
        self._actions.append(SleepModel(model.name, f"nobody asked for it in {ttl:g} s"))
        for one in model.staying:
            self._stopped.add(one.id)
            self._give(one.bytes)

    # --- 3 ---------------------------------------------------------------------------------------------------------

    def _feed(self, model: ModelView) -> None:
        claimed = [one for one in model.replicas if one.state == "placing" and one.id not in self._stopped]
        missing = model.wanted - len(model.staying) + len(claimed) - self._regret(model)
        for number in range(missing):
            claim = claimed[number].id if number < len(claimed) else None
            if not self._feed_one(model, claim):
                return

    def _regret(self, model: ModelView) -> int:
        """How many of those that drain for nobody go on instead."""
        placing = any(r.state == "placing" and r.id not in self._stopped for m in self._view.models for r in m.replicas)
        drained = [one for one in model.replicas if one.state == "draining" and one.evicting and not placing]
        kept = drained[: max(0, model.wanted - len(model.staying))]
        for one in kept:
            self._actions.append(KeepReplica(model.name, one.id))  # 3.1
            self._take(one.bytes, self._coming)
        return len(kept)

    def _feed_one(self, model: ModelView, claim: int | None) -> bool:
        """Whether to look at the model's next missing replica as well."""
        if model.need is None:
            self._actions.append(EstimateMemory(model.name))  # 3.2
            return False
        needs = {site: model.need_at(site) for site in self._view.sites}
        possible = {site: need for site, need in needs.items() if fits(need, self._view.hard)}
        if not possible:
            if not any(one.state != "placing" for one in model.staying):
                need = needs[self._view.sites[0]]
                self._actions.append(RejectModel(model.name, _too_large(model.name, need, self._view.hard)))  # 3.3
            return False
        for site, need in possible.items():
            if fits(need, self._left):
                self._start(model, need, claim, site)  # 3.4
                return True
        if model.asked_since is None and (self._fed or any(self._held())):
            if model.name not in self._fed and not any(one.state != "placing" for one in model.staying):
                self._actions.append(SleepModel(model.name, "there is no room for it beside what is loaded"))  # 3.5
            return False
        return self._make_room(model, possible, claim)

    def _make_room(self, model: ModelView, needs: Mapping[str, DeviceBytes], claim: int | None) -> bool:
        for need in needs.values():
            if fits(need, self._coming):
                self._claim(model, need, claim)  # 3.6
                return True
        others = [(m, r) for m in self._view.models if m.name != model.name for r in m.replicas if self._is_up(r)]
        for candidates in (self._idlers(others), self._idlers(others) + self._overdue(others, model)):  # 3.7, 3.8
            for need in needs.values():
                if (chosen := self._victims(need, candidates)) is not None:
                    self._evict(candidates, chosen)
                    self._claim(model, need, claim)
                    return True
        possible = any(self._victims(need, others) is not None for need in needs.values())
        allowed = next((site for site, need in needs.items() if fits(need, self._allowed)), None)
        if not possible and allowed is not None and not self._is_busy():
            self._start(model, needs[allowed], claim, allowed)  # 3.9
            return True
        self._wait(others, model)  # 3.10
        return False

    def _victims(self, need: DeviceBytes, candidates: list[tuple[ModelView, ReplicaView]]) -> tuple[int, ...] | None:
        return choose_evictions(need, self._coming, [_tenant(m, r, self._now) for m, r in candidates])

    def _evict(self, candidates: list[tuple[ModelView, ReplicaView]], chosen: tuple[int, ...]) -> None:
        for model, one in candidates:
            if one.id in chosen:
                self._stop(model, one, evict=True)

    def _is_up(self, one: ReplicaView) -> bool:
        return one.state == "ready" and one.id not in self._stopped

    def _is_busy(self) -> bool:
        """Somebody loads, restarts or leaves: what will be free is not known yet."""
        states = (one.state for model in self._view.models for one in model.replicas)
        return bool(self._stopped or self._fed) or any(state not in ("ready", "placing") for state in states)

    def _held(self) -> Iterator[DeviceBytes]:
        return (one.bytes for model in self._view.models for one in model.replicas if one.state != "placing")

    def _idlers(self, others: list[tuple[ModelView, ReplicaView]]) -> list[tuple[ModelView, ReplicaView]]:
        return [(m, r) for m, r in others if _is_idle(m, r) and r.idle_since + self._view.linger_s <= self._now]

    def _overdue(
        self, others: list[tuple[ModelView, ReplicaView]], model: ModelView
    ) -> list[tuple[ModelView, ReplicaView]]:
        return [(m, r) for m, r in others if not _is_idle(m, r) and self._turn_ends(r, model) <= self._now]

    def _turn_ends(self, one: ReplicaView, model: ModelView) -> float:
        return max(model.asked_since or 0.0, one.ready_since) + self._view.patience_s

    def _wait(self, others: list[tuple[ModelView, ReplicaView]], model: ModelView) -> None:
        for other, one in others:
            due = one.idle_since + self._view.linger_s if _is_idle(other, one) else self._turn_ends(one, model)
            if due > self._now:
                self._wakes.append(due)

    # --- what the next decision has to know ------------------------------------------------------------------------

    def _start(self, model: ModelView, need: DeviceBytes, claim: int | None, site: str) -> None:
        self._actions.append(StartReplica(model.name, claim, site))
        self._grant(model, need)

    def _claim(self, model: ModelView, need: DeviceBytes, claim: int | None) -> None:
        if claim is None:
            self._actions.append(ReserveMemory(model.name, "waiting for memory"))
        self._grant(model, need)

    def _grant(self, model: ModelView, need: DeviceBytes) -> None:
        self._fed.add(model.name)
        self._take(need, self._left, self._coming, self._allowed)

    def _stop(self, model: ModelView, one: ReplicaView, *, evict: bool = False) -> None:
        self._actions.append(StopReplica(model.name, one.id, evict))
        self._stopped.add(one.id)
        if one.state != "placing":
            self._give(one.bytes)

    def _give(self, held: DeviceBytes) -> None:
        for device, amount in held.items():
            if device in self._coming:
                self._coming[device] += amount

    def _take(self, need: DeviceBytes, *rooms: dict[str, int]) -> None:
        for room in rooms:
            for device, amount in need.items():
                if device in room:
                    room[device] -= amount


def _urgency(model: ModelView) -> tuple[bool, float]:
    """Those for whom room is being made already come first: what was freed for them is theirs."""
    claims = any(one.state == "placing" for one in model.replicas)
    return not claims, model.asked_since if model.asked_since is not None else float("inf")


def _dispensable(one: ReplicaView) -> tuple[int, int, int]:
    order = {"placing": 0, "restarting": 1, "loading": 2, "ready": 3}
    return order.get(one.state, 3), one.running, -one.id


def _is_idle(model: ModelView, one: ReplicaView) -> bool:
    return not one.running and not model.waiting


def _tenant(model: ModelView, one: ReplicaView, now: float) -> EvictionCandidate:
    idle_s = now - one.idle_since if _is_idle(model, one) else 0.0
    spare = len(model.staying) > 1
    return EvictionCandidate(id=one.id, bytes=one.bytes, load_s=model.load_s, idle_s=idle_s, spare=spare)


def _too_large(name: str, need: DeviceBytes, hard: DeviceBytes) -> InvalidRequest:
    device = next(d for d, amount in need.items() if d in hard and amount > hard[d])
    where = "memory_limit" if device.partition("@")[0] == "cpu" else "gpu_memory_limit"
    wanted, most = (f"{amount / 2**20:.0f} MiB" for amount in (need[device], hard[device]))
    return InvalidRequest(
        f"the model {name!r} needs about {wanted} and the limit is {most}; raise {where} under [scheduler], or take a "
        "smaller n_ctx or parallel",
        code="model_too_large",
    )
