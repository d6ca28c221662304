"""What fits into memory, and who has to go so that it does. Pure."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from modelyard.core.engine import AvailableMemory, MemoryEstimate, Node
from modelyard.core.errors import ModelyardError
from modelyard.core.pool import ModelSpec

if TYPE_CHECKING:
    from modelyard.scheduler.pooled_model import PooledModel
    from modelyard.scheduler.replica import Replica

DeviceBytes = Mapping[str, int]  # by device: "cpu" is RAM, "gpu" all GPUs together, else one GPU by its id
MemoryMeter = Callable[
    [], DeviceBytes
]  # bytes in use by device, by this program and its children; it is read in a thread


class MemoryLimits(Struct, frozen=True):
    """What the models may take, as it was set: of RAM, of each GPU, or of some GPUs by their ids."""

    ram: int | None = None
    each_gpu: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)

    def on(self, machine: AvailableMemory) -> dict[str, int]:
        """Bytes by device, for the devices that are limited."""
        limits = {"cpu": self.ram} if self.ram is not None else {}
        found = {uuid: of for uuid in machine.gpus if (of := self.gpus.get(uuid, self.each_gpu)) is not None}
        if found and len(found) == len(machine.gpus):
            limits["gpu"] = sum(found.values())
        return limits | {f"gpu:{uuid}": of for uuid, of in found.items()}


def bytes_on_node(site: str, need: DeviceBytes | None, abroad: Mapping[str, DeviceBytes]) -> DeviceBytes:
    """What a replica takes on that machine: what was worked out for it, or else the same as here."""
    return with_node(abroad.get(site, need or {}), site)


def with_node(bytes_: DeviceBytes, site: str) -> dict[str, int]:
    """The same on another machine, whose devices are others."""
    return {f"{device}@{site}" if site else device: amount for device, amount in bytes_.items()}


class EvictionCandidate(Struct, frozen=True, kw_only=True):
    """A replica that could be stopped to make room. `spare`: others of its model would stay."""

    id: int
    bytes: DeviceBytes
    load_s: float = 1.0
    idle_s: float = 0.0
    spare: bool = False

    @property
    def cost(self) -> float:
        """How much its absence will hurt: long to load hurts more, long unused less, one of several half as much."""
        return self.load_s * (0.5 if self.spare else 1.0) / (1.0 + self.idle_s)


# How far what was measured may correct an estimate, down and up. RAM is not used before it is written to, so a load
# that has just ended shows too little of it; and others in the same process show, too. GPU memory is taken at once.
_BELIEVED = {"cpu": (1.0, 1.5), "gpu": (0.5, 2.0)}


def replica_bytes(memory: MemoryEstimate, measured: int | None) -> dict[str, int]:
    """What one replica counts for: the estimate, corrected by what was measured as far as that can be believed."""
    device = "cpu" if memory.device in ("", "cpu") else "gpu"
    bytes_ = memory.total
    if measured is not None:
        low, high = _BELIEVED[device]
        bytes_ = int(min(max(measured, low * bytes_), high * bytes_)) if bytes_ else measured
    if not bytes_:
        return {}
    # One of several GPUs counts for itself and for all of them; an engine that names none spreads over all.
    return {device: bytes_} | ({memory.device: bytes_} if memory.device.startswith("gpu:") else {})


def free_bytes(limits: DeviceBytes, tenants: Iterable[DeviceBytes]) -> dict[str, int]:
    """What is left of each limited device; less than nothing where others have claimed more."""
    left = dict(limits)
    for held in tenants:
        for device, amount in held.items():
            if device in left:
                left[device] -= amount
    return left


def fits(need: DeviceBytes, left: DeviceBytes) -> bool:
    return all(amount <= left[device] for device, amount in need.items() if device in left)


def choose_evictions(
    need: DeviceBytes, left: DeviceBytes, tenants: Sequence[EvictionCandidate]
) -> tuple[int, ...] | None:
    """The cheapest to stop so that `need` fits; None where even all of them would not do.

    Taken by cost for each byte that they give, until it fits; then whoever proved unnecessary stays after all.
    """
    chosen = _enough(need, left, tenants)
    if chosen is None:
        return None
    for one in sorted(chosen, key=lambda t: t.cost, reverse=True):
        rest = [t for t in chosen if t is not one]
        if fits(need, _with(left, rest)):
            chosen = rest
    return tuple(t.id for t in chosen)


def _enough(
    need: DeviceBytes, left: DeviceBytes, tenants: Sequence[EvictionCandidate]
) -> list[EvictionCandidate] | None:
    chosen: list[EvictionCandidate] = []
    by_price = sorted((t for t in tenants if _gives(t, need, left)), key=lambda t: t.cost / _gives(t, need, left))
    for tenant in by_price:
        if fits(need, _with(left, chosen)):
            break
        chosen.append(tenant)
    return chosen if fits(need, _with(left, chosen)) else None


def _gives(tenant: EvictionCandidate, need: DeviceBytes, left: DeviceBytes) -> int:
    """Bytes on those devices that are too full."""
    short = (device for device, amount in need.items() if device in left and amount > left[device])
    return sum(tenant.bytes.get(device, 0) for device in short)


def _with(left: DeviceBytes, leaving: Iterable[EvictionCandidate]) -> dict[str, int]:
    after = dict(left)
    for tenant in leaving:
        for device, amount in tenant.bytes.items():
            if device in after:
                after[device] += amount
    return after


# What each model really took when it was last loaded, remembered between runs in a small file.

log = logging.getLogger(__name__)

_KEPT = 256  # of the newest


class LoadMeasurement(Struct, frozen=True):
    """`bytes` is None where only the time is known: another load at the same time makes the bytes nobody's."""

    bytes: int | None
    load_s: float


class MeasurementStore:
    """By the identity of a blueprint: another window or another file is another entry. No path: it forgets."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: dict[str, LoadMeasurement] = _read(path) if path is not None else {}

    def get(self, identity: str) -> LoadMeasurement | None:
        return self._entries.get(identity)

    def put(self, identity: str, measured: LoadMeasurement) -> None:
        old = self._entries.pop(identity, None)
        if measured.bytes is None and old is not None:
            measured = LoadMeasurement(old.bytes, measured.load_s)
        self._entries[identity] = measured
        while len(self._entries) > _KEPT:
            del self._entries[next(iter(self._entries))]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self._entries), indent=1)

    def save(self, content: bytes) -> None:
        """To be called in a thread. What cannot be written is only not remembered."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A name of its own: two servers that write at once must not write into one another's file.
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            fresh.write_bytes(content)
            fresh.replace(self._path)
        except OSError as error:
            log.warning("what models took of memory is not remembered: %s", error)


def _read(path: Path) -> dict[str, LoadMeasurement]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, LoadMeasurement])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read and is made anew: %s", path, error)
        return {}


# What a replica will take: the engine's estimate, corrected by what was measured when it was last loaded.

_NOISE = 64 * 2**20  # what a process grows and shrinks by for other reasons

_NOWHERE = AvailableMemory(2**62)


class MemoryBudget(Struct, frozen=True):
    """What the policy has to know of the machines: see `PoolView`."""

    hard: DeviceBytes
    soft: DeviceBytes
    sites: tuple[str, ...]


class MemoryPlanner:
    """`machine` tells what is free; `gauge` what is in use by this program. Without them limits alone decide. `sites`
    are the machines on which the next replica may go; limits hold on each of them."""

    def __init__(
        self,
        limits: MemoryLimits = MemoryLimits(),
        *,
        machine: Callable[[], AvailableMemory] | None = None,
        gauge: MemoryMeter | None = None,
        ledger: MeasurementStore | None = None,
        sites: Callable[[], Sequence[Node]] = lambda: (Node(),),
    ) -> None:
        self._limits, self._machine, self._gauge, self._sites = limits, machine, gauge, sites
        self._ledger = ledger or MeasurementStore()
        self.hard: DeviceBytes = limits.on(_NOWHERE)
        self.soft: DeviceBytes = {}
        self._abroad: dict[str, DeviceBytes] = {}  # the same of other machines, as they were when first looked at
        self._moves = 0  # loads begun and engines closed: one more during a load, and what grew is nobody's

    async def survey(self, model: PooledModel, held: Callable[[], Iterable[DeviceBytes]]) -> None:
        """Sets the model's `need`, and what the machine has."""
        blueprint = model.current
        others = [site for site in self._sites() if site.name and site.machine is not None]
        here, memory, abroad = await asyncio.to_thread(self._look, blueprint, others)
        if model.current is not blueprint:  # altered meanwhile: to be looked at anew
            return
        model.abroad = abroad
        self._abroad.clear()
        known = self._ledger.get(blueprint.identity)
        model.estimate = memory
        model.measured = known.bytes if known is not None else None
        model.load_s = model.load_s or (known.load_s if known is not None else None)
        self.hard = self._limits.on(here)
        model.need = self._need(model)
        if self._machine is not None:
            self.soft = _soft(here, list(held()))

    def room(self, held: Callable[[], Iterable[DeviceBytes]]) -> MemoryBudget:
        """What there is on this machine and on the others, as they are known now."""
        hard, soft, sites = dict(self.hard), dict(self.soft), self._sites()
        for name, there in ((site.name, site.machine) for site in sites if site.name):
            if there is not None:
                if name not in self._abroad:
                    self._abroad[name] = _soft(there, list(held()), name)
                soft |= self._abroad[name]
                hard |= with_node(self._limits.on(there), name)
        return MemoryBudget(hard, soft, tuple(site.name for site in sites))

    def _need(self, model: PooledModel) -> DeviceBytes:
        """What was measured may have been others' growth: it never makes a model too large for a limit that its
        estimate fits into."""
        if model.estimate is None:
            return {}
        plain = replica_bytes(model.estimate, None)
        return {
            device: min(amount, max(plain.get(device, 0), self.hard.get(device, amount)))
            for device, amount in replica_bytes(model.estimate, model.measured).items()
        }

    def _look(
        self, blueprint: ModelSpec, others: Iterable[Node]
    ) -> tuple[AvailableMemory, MemoryEstimate | None, Mapping[str, DeviceBytes]]:
        here = self._machine() if self._machine is not None else _NOWHERE
        found = {site.name: _estimate(blueprint, site.machine) for site in others if site.machine is not None}
        abroad = {name: replica_bytes(memory, None) for name, memory in found.items() if memory is not None}
        return here, _estimate(blueprint, here), abroad

    def gauge(self, model: PooledModel) -> MemoryMeter | None:
        """To be read around a load, where that is large enough to be seen."""
        return self._gauge if model.estimate is not None and model.estimate.total >= _NOISE else None

    def moved(self) -> int:
        self._moves += 1
        return self._moves

    def loaded(self, model: PooledModel, replica: Replica, load_s: float, *, quiet: bool) -> bool:
        """Learns from a load; whether there is something new to be written down. `quiet`: no request ran meanwhile."""
        model.load_s = load_s
        if replica.site:  # what grew here is not what it took there
            return False
        device = "cpu" if model.estimate is None or model.estimate.device in ("", "cpu") else "gpu"
        grown = (replica.took or {}).get(device, 0)
        bytes_ = grown if grown >= _NOISE and quiet and replica.moves == self._moves else None
        model.measured = bytes_ or model.measured
        if model.estimate is not None:
            replica.bytes = self._need(model)
        if not model.current.identity or self._gauge is None or replica.took is None:
            return False
        self._ledger.put(model.current.identity, LoadMeasurement(bytes_, load_s))
        return True

    async def write(self) -> None:
        await asyncio.to_thread(self._ledger.save, self._ledger.encode())


def _estimate(blueprint: ModelSpec, there: AvailableMemory) -> MemoryEstimate | None:
    try:
        return blueprint.estimate(there) if blueprint.estimate is not None else None
    except ModelyardError as error:  # the load itself will say so, in its own words
        log.info("what %s takes of memory is not known: %s", blueprint.name, error.message)
        return None


def _soft(here: AvailableMemory, held: Iterable[DeviceBytes], site: str = "") -> dict[str, int]:
    """All that models could have: what is free now, and what they hold already."""
    room = {"cpu": here.ram_free}
    if here.gpus:
        room |= {"gpu": sum(here.gpus.values())} | {f"gpu:{uuid}": free for uuid, free in here.gpus.items()}
    room = with_node(room, site)
    for bytes_ in held:
        for device, amount in bytes_.items():
            if device in room:
                room[device] += amount
    return room
