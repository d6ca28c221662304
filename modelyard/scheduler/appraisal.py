"""What a replica will take: the engine's estimate, corrected by what was measured when it was last loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from modelyard.core.engine import AvailableMemory, MemoryEstimate, Node
from modelyard.core.errors import ModelyardError
from modelyard.core.pool import ModelSpec
from modelyard.scheduler.measured import Ledger, Measured
from modelyard.scheduler.model import Pooled
from modelyard.scheduler.placement import Bytes, Limits, at, taken
from modelyard.scheduler.replica import Gauge, Replica

log = logging.getLogger(__name__)

_NOISE = 64 * 2**20  # what a process grows and shrinks by for other reasons

_NOWHERE = AvailableMemory(2**62)


class Room(Struct, frozen=True):
    """What the policy has to know of the machines: see `PoolView`."""

    hard: Bytes
    soft: Bytes
    sites: tuple[str, ...]


class Appraiser:
    """`machine` tells what is free; `gauge` what is in use by this program. Without them limits alone decide. `sites`
    are the machines on which the next replica may go; limits hold on each of them."""

    def __init__(
        self,
        limits: Limits = Limits(),
        *,
        machine: Callable[[], AvailableMemory] | None = None,
        gauge: Gauge | None = None,
        ledger: Ledger | None = None,
        sites: Callable[[], Sequence[Node]] = lambda: (Node(),),
    ) -> None:
        self._limits, self._machine, self._gauge, self._sites = limits, machine, gauge, sites
        self._ledger = ledger or Ledger()
        self.hard: Bytes = limits.on(_NOWHERE)
        self.soft: Bytes = {}
        self._abroad: dict[str, Bytes] = {}  # the same of other machines, as they were when first looked at
        self._moves = 0  # loads begun and engines closed: one more during a load, and what grew is nobody's

    async def survey(self, model: Pooled, held: Callable[[], Iterable[Bytes]]) -> None:
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

    def room(self, held: Callable[[], Iterable[Bytes]]) -> Room:
        """What there is on this machine and on the others, as they are known now."""
        hard, soft, sites = dict(self.hard), dict(self.soft), self._sites()
        for name, there in ((site.name, site.machine) for site in sites if site.name):
            if there is not None:
                if name not in self._abroad:
                    self._abroad[name] = _soft(there, list(held()), name)
                soft |= self._abroad[name]
                hard |= at(self._limits.on(there), name)
        return Room(hard, soft, tuple(site.name for site in sites))

    def _need(self, model: Pooled) -> Bytes:
        """What was measured may have been others' growth: it never makes a model too large for a limit that its
        estimate fits into."""
        if model.estimate is None:
            return {}
        plain = taken(model.estimate, None)
        return {
            device: min(amount, max(plain.get(device, 0), self.hard.get(device, amount)))
            for device, amount in taken(model.estimate, model.measured).items()
        }

    def _look(
        self, blueprint: ModelSpec, others: Iterable[Node]
    ) -> tuple[AvailableMemory, MemoryEstimate | None, Mapping[str, Bytes]]:
        here = self._machine() if self._machine is not None else _NOWHERE
        found = {site.name: _estimate(blueprint, site.machine) for site in others if site.machine is not None}
        abroad = {name: taken(memory, None) for name, memory in found.items() if memory is not None}
        return here, _estimate(blueprint, here), abroad

    def gauge(self, model: Pooled) -> Gauge | None:
        """To be read around a load, where that is large enough to be seen."""
        return self._gauge if model.estimate is not None and model.estimate.total >= _NOISE else None

    def moved(self) -> int:
        self._moves += 1
        return self._moves

    def loaded(self, model: Pooled, replica: Replica, load_s: float, *, quiet: bool) -> bool:
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
        self._ledger.put(model.current.identity, Measured(bytes_, load_s))
        return True

    async def write(self) -> None:
        await asyncio.to_thread(self._ledger.save, self._ledger.encode())


def _estimate(blueprint: ModelSpec, there: AvailableMemory) -> MemoryEstimate | None:
    try:
        return blueprint.estimate(there) if blueprint.estimate is not None else None
    except ModelyardError as error:  # the load itself will say so, in its own words
        log.info("what %s takes of memory is not known: %s", blueprint.name, error.message)
        return None


def _soft(here: AvailableMemory, held: Iterable[Bytes], site: str = "") -> dict[str, int]:
    """All that models could have: what is free now, and what they hold already."""
    room = {"cpu": here.ram_free}
    if here.gpus:
        room |= {"gpu": sum(here.gpus.values())} | {f"gpu:{uuid}": free for uuid, free in here.gpus.items()}
    room = at(room, site)
    for bytes_ in held:
        for device, amount in bytes_.items():
            if device in room:
                room[device] += amount
    return room
