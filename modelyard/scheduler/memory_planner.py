"""Memory: what a replica takes, what fits, and which replicas to evict.

Bytes are counted by device. A replica counts as the engine's estimate, corrected by what was measured at its last load.
Measurements persist between runs in a small file. The functions up to `choose_evictions` are pure.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate, Node
from modelyard.core.errors import ModelyardError

if TYPE_CHECKING:
    from modelyard.scheduler.pooled_model import PooledModel, Replica

log = logging.getLogger(__name__)

DeviceBytes = Mapping[str, int]
"""By device: "cpu" is RAM, "gpu" all GPUs together, "gpu:UUID" one GPU. Devices of another node end in "@NODE"."""

MemoryMeter = Callable[[], DeviceBytes]  # bytes in use by this program and its children; called in a thread

# How far a measurement may correct an estimate, down and up. RAM is not used before it is written to, so a finished
# load shows too little of it, and other models in the same process show too. GPU memory is allocated at once.
_TRUSTED_RANGE = {"cpu": (1.0, 1.5), "gpu": (0.5, 2.0)}
_NOISE = 64 * 2**20  # a process grows and shrinks by this much for other reasons
_UNLIMITED = AvailableMemory(2**62)
_MAX_MEASUREMENTS = 256


# --- estimates and limits -------------------------------------------------------------------------------------------


class MemoryLimits(Struct, frozen=True):
    """The configured limits: of RAM, of each GPU, or of some GPUs by UUID."""

    ram: int | None = None
    each_gpu: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)

    def by_device(self, memory: AvailableMemory) -> dict[str, int]:
        """The limited devices of a machine."""
        limits = {"cpu": self.ram} if self.ram is not None else {}
        found = {uuid: limit for uuid in memory.gpus if (limit := self.gpus.get(uuid, self.each_gpu)) is not None}
        if found and len(found) == len(memory.gpus):
            limits["gpu"] = sum(found.values())
        return limits | {f"gpu:{uuid}": limit for uuid, limit in found.items()}


def replica_bytes(estimate: MemoryEstimate, measured: int | None) -> dict[str, int]:
    """What one replica counts for: the estimate, corrected by the measurement within its trusted range."""
    device = "cpu" if estimate.device in ("", "cpu") else "gpu"
    total = estimate.total
    if measured is not None:
        low, high = _TRUSTED_RANGE[device]
        needed = measured - estimate.page_cache  # clean pages are resident, too
        total = int(min(max(needed, low * total), high * total)) if total else measured
    if not total:
        return {}
    # A specific GPU counts for itself and for all GPUs. An engine that names none spreads over all.
    return {device: total} | ({estimate.device: total} if estimate.device.startswith("gpu:") else {})


def with_node(bytes_: DeviceBytes, node: str) -> dict[str, int]:
    """The same bytes on the devices of another node."""
    return {f"{device}@{node}" if node else device: amount for device, amount in bytes_.items()}


def bytes_on_node(node: str, need: DeviceBytes | None, need_by_node: Mapping[str, DeviceBytes]) -> DeviceBytes:
    """What a replica takes on a node: its own estimate for that node, or else the local one."""
    return with_node(need_by_node.get(node, need or {}), node)


# --- what fits ------------------------------------------------------------------------------------------------------


class EvictionCandidate(Struct, frozen=True, kw_only=True):
    """A replica that may be stopped. `has_siblings`: other replicas of its model stay."""

    id: int
    bytes: DeviceBytes
    load_s: float = 1.0
    idle_s: float = 0.0
    has_siblings: bool = False

    @property
    def cost(self) -> float:
        """Grows with the load time, falls with the idle time; half if other replicas of the model stay."""
        return self.load_s * (0.5 if self.has_siblings else 1.0) / (1.0 + self.idle_s)


def free_bytes(limits: DeviceBytes, held: Iterable[DeviceBytes]) -> dict[str, int]:
    """The free bytes of each limited device; negative if more is held than the limit allows."""
    free = dict(limits)
    for each in held:
        for device, amount in each.items():
            if device in free:
                free[device] -= amount
    return free


def fits(need: DeviceBytes, free: DeviceBytes) -> bool:
    return all(amount <= free[device] for device, amount in need.items() if device in free)


def choose_evictions(
    need: DeviceBytes, free: DeviceBytes, candidates: Sequence[EvictionCandidate]
) -> tuple[int, ...] | None:
    """The cheapest replicas to stop so that `need` fits; None if stopping all of them is not enough.

    Candidates are taken by cost per freed byte until `need` fits. Then those that proved unnecessary are dropped again.
    """
    short = [device for device, amount in need.items() if device in free and amount > free[device]]

    def freed(candidate: EvictionCandidate) -> int:
        return sum(candidate.bytes.get(device, 0) for device in short)

    chosen: list[EvictionCandidate] = []
    for candidate in sorted((c for c in candidates if freed(c)), key=lambda c: c.cost / freed(c)):
        if fits(need, _free_after(free, chosen)):
            break
        chosen.append(candidate)
    if not fits(need, _free_after(free, chosen)):
        return None
    for candidate in sorted(chosen, key=lambda c: c.cost, reverse=True):
        others = [c for c in chosen if c is not candidate]
        if fits(need, _free_after(free, others)):
            chosen = others
    return tuple(c.id for c in chosen)


def _free_after(free: DeviceBytes, evicted: Iterable[EvictionCandidate]) -> dict[str, int]:
    return free_bytes(free, ({device: -amount for device, amount in c.bytes.items()} for c in evicted))


# --- measurements ---------------------------------------------------------------------------------------------------


class LoadMeasurement(Struct, frozen=True):
    """`bytes` is None if only the time is known, because another load ran at the same time."""

    bytes: int | None
    load_s: float


class MeasurementStore:
    """The last measurement of each model identity: another window or file is another entry. Without a path nothing is
    saved."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: dict[str, LoadMeasurement] = _read_measurements(path) if path is not None else {}

    def get(self, identity: str) -> LoadMeasurement | None:
        return self._entries.get(identity)

    def put(self, identity: str, measurement: LoadMeasurement) -> None:
        old = self._entries.pop(identity, None)
        if measurement.bytes is None and old is not None:
            measurement = LoadMeasurement(old.bytes, measurement.load_s)
        self._entries[identity] = measurement
        while len(self._entries) > _MAX_MEASUREMENTS:
            del self._entries[next(iter(self._entries))]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self._entries), indent=1)

    def save(self, content: bytes) -> None:
        """Call in a thread. A write error is logged and otherwise ignored."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A file name per process: two servers that save at once must not write into the same file.
            temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            temporary.write_bytes(content)
            temporary.replace(self._path)
        except OSError as error:
            log.warning("cannot save memory measurements: %s", error)


def _read_measurements(path: Path) -> dict[str, LoadMeasurement]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, LoadMeasurement])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("cannot read %s, starting with an empty one: %s", path, error)
        return {}


# --- the planner ----------------------------------------------------------------------------------------------------


class PoolMemory(Struct, frozen=True):
    """The memory of all nodes as the policy sees it; `PoolView` describes the fields."""

    hard: DeviceBytes
    soft: DeviceBytes
    nodes: tuple[str, ...]


class MemoryPlanner:
    """`available` returns the free memory of this machine, `meter` the memory in use by this program. Without them only
    the limits count. `nodes` are the machines that may get the next replica; the limits apply to each of them."""

    def __init__(
        self,
        limits: MemoryLimits = MemoryLimits(),
        *,
        available: Callable[[], AvailableMemory] | None = None,
        meter: MemoryMeter | None = None,
        measurements: MeasurementStore | None = None,
        nodes: Callable[[], Sequence[Node]] = lambda: (Node(),),
        estimate: Callable[[EngineSpec, AvailableMemory], MemoryEstimate] | None = None,
    ) -> None:
        self._estimate = estimate
        self._limits, self._available, self._meter, self._nodes = limits, available, meter, nodes
        self._measurements = measurements or MeasurementStore()
        self.hard: DeviceBytes = limits.by_device(_UNLIMITED)
        self.soft: DeviceBytes = {}
        self._soft_by_node: dict[str, DeviceBytes] = {}  # of other nodes, as they were when first seen
        self._allocations = 0

    async def estimate(self, model: PooledModel, held: Callable[[], Iterable[DeviceBytes]]) -> None:
        """Set the model's `need` and update the memory of this machine."""
        spec = model.active_spec
        others = [node for node in self._nodes() if node.name and node.memory is not None]

        def look() -> tuple[AvailableMemory, MemoryEstimate | None, dict[str, DeviceBytes]]:
            here = self._available() if self._available is not None else _UNLIMITED
            found = {node.name: self._estimated(spec, node.memory) for node in others if node.memory is not None}
            needs = {name: replica_bytes(each, None) for name, each in found.items() if each is not None}
            return here, self._estimated(spec, here), dict(needs)

        here, estimate, need_by_node = await asyncio.to_thread(look)
        if model.active_spec is not spec:  # reconfigured meanwhile: the next plan estimates it again
            return
        model.need_by_node = need_by_node
        self._soft_by_node.clear()
        known = self._measurements.get(spec.identity)
        model.estimate = estimate
        model.measured = known.bytes if known is not None else None
        model.load_s = model.load_s or (known.load_s if known is not None else None)
        self.hard = self._limits.by_device(here)
        model.need = self._need(model)
        if self._available is not None:
            self.soft = _soft_limits(here, held())

    def _estimated(self, spec: EngineSpec, available: AvailableMemory) -> MemoryEstimate | None:
        """It may read files: call it in a thread."""
        try:
            return self._estimate(spec, available) if self._estimate is not None else None
        except ModelyardError as error:  # the load reports the same error
            log.info("cannot estimate the memory of %s: %s", spec.model, error.message)
            return None

    @property
    def unknown(self) -> DeviceBytes | None:
        """The `need` of a model that is to be estimated: None, or nothing if no model is."""
        return None if self._estimate is not None else {}

    def budget(self, held: Callable[[], Iterable[DeviceBytes]]) -> PoolMemory:
        """The memory of this machine and of the other nodes, as known now."""
        hard, soft, nodes = dict(self.hard), dict(self.soft), self._nodes()
        for node in nodes:
            if node.name and node.memory is not None:
                if node.name not in self._soft_by_node:
                    self._soft_by_node[node.name] = _soft_limits(node.memory, held(), node.name)
                soft |= self._soft_by_node[node.name]
                hard |= with_node(self._limits.by_device(node.memory), node.name)
        return PoolMemory(hard, soft, tuple(node.name for node in nodes))

    def _need(self, model: PooledModel) -> DeviceBytes:
        """A measurement may include growth of other models. It never makes a model too large for a limit that its
        estimate fits."""
        if model.estimate is None:
            return {}
        estimated = replica_bytes(model.estimate, None)
        return {
            device: min(amount, max(estimated.get(device, 0), self.hard.get(device, amount)))
            for device, amount in replica_bytes(model.estimate, model.measured).items()
        }

    def meter_for(self, model: PooledModel) -> MemoryMeter | None:
        """The meter to read before and after a load, if the model is large enough to show."""
        return self._meter if model.estimate is not None and model.estimate.total >= _NOISE else None

    def count_allocation(self) -> int:
        """A load started or an engine closed. If the number changes during a load, its measurement is not valid."""
        self._allocations += 1
        return self._allocations

    def record_load(self, model: PooledModel, replica: Replica, load_s: float, *, quiet: bool) -> bool:
        """Learn from a load. Returns whether there is a new measurement to save. `quiet`: no request ran meanwhile."""
        model.load_s = load_s
        if replica.node:  # the local meter says nothing about another node
            return False
        device = "cpu" if model.estimate is None or model.estimate.device in ("", "cpu") else "gpu"
        growth = (replica.load_growth or {}).get(device, 0)
        valid = growth >= _NOISE and quiet and replica.allocation == self._allocations
        measured = growth if valid else None
        model.measured = measured or model.measured
        if model.estimate is not None:
            replica.bytes = self._need(model)
        if not model.active_spec.identity or self._meter is None or replica.load_growth is None:
            return False
        self._measurements.put(model.active_spec.identity, LoadMeasurement(measured, load_s))
        return True

    async def save(self) -> None:
        await asyncio.to_thread(self._measurements.save, self._measurements.encode())


def _soft_limits(available: AvailableMemory, held: Iterable[DeviceBytes], node: str = "") -> dict[str, int]:
    """What models can have at most: what is free now, and what they hold already."""
    free = {"cpu": available.ram_free}
    if available.gpus:
        free |= {"gpu": sum(available.gpus.values())}
        free |= {f"gpu:{uuid}": amount for uuid, amount in available.gpus.items()}
    return free_bytes(with_node(free, node), ({device: -amount for device, amount in each.items()} for each in held))
