"""What fits into memory, and who has to go so that it does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from modelyard.core.engine import AvailableMemory, MemoryEstimate

Bytes = Mapping[str, int]  # by device: "cpu" is RAM, "gpu" all GPUs together, else one GPU by its id


class Limits(Struct, frozen=True):
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


def needed(site: str, need: Bytes | None, abroad: Mapping[str, Bytes]) -> Bytes:
    """What a replica takes on that machine: what was worked out for it, or else the same as here."""
    return at(abroad.get(site, need or {}), site)


def at(bytes_: Bytes, site: str) -> dict[str, int]:
    """The same on another machine, whose devices are others."""
    return {f"{device}@{site}" if site else device: amount for device, amount in bytes_.items()}


class Tenant(Struct, frozen=True, kw_only=True):
    """A replica that could be stopped to make room. `spare`: others of its model would stay."""

    id: int
    bytes: Bytes
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


def taken(memory: MemoryEstimate, measured: int | None) -> dict[str, int]:
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


def free(limits: Bytes, tenants: Iterable[Bytes]) -> dict[str, int]:
    """What is left of each limited device; less than nothing where others have claimed more."""
    left = dict(limits)
    for held in tenants:
        for device, amount in held.items():
            if device in left:
                left[device] -= amount
    return left


def fits(need: Bytes, left: Bytes) -> bool:
    return all(amount <= left[device] for device, amount in need.items() if device in left)


def victims(need: Bytes, left: Bytes, tenants: Sequence[Tenant]) -> tuple[int, ...] | None:
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


def _enough(need: Bytes, left: Bytes, tenants: Sequence[Tenant]) -> list[Tenant] | None:
    chosen: list[Tenant] = []
    by_price = sorted((t for t in tenants if _gives(t, need, left)), key=lambda t: t.cost / _gives(t, need, left))
    for tenant in by_price:
        if fits(need, _with(left, chosen)):
            break
        chosen.append(tenant)
    return chosen if fits(need, _with(left, chosen)) else None


def _gives(tenant: Tenant, need: Bytes, left: Bytes) -> int:
    """Bytes on those devices that are too full."""
    short = (device for device, amount in need.items() if device in left and amount > left[device])
    return sum(tenant.bytes.get(device, 0) for device in short)


def _with(left: Bytes, leaving: Iterable[Tenant]) -> dict[str, int]:
    after = dict(left)
    for tenant in leaving:
        for device, amount in tenant.bytes.items():
            if device in after:
                after[device] += amount
    return after
