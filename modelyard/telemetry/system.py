"""What the machine gives us right now: CPU and memory of this process with its children, and every GPU's load.

A reading takes milliseconds (it walks the process table, and a first look at a GPU starts its driver): read it in a
thread, never on the event loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped]
from msgspec import Struct

from modelyard.core.engine import AvailableMemory


class GpuLoad(Struct, frozen=True):
    uuid: str
    percent: float
    memory: int


class SystemLoad(Struct, frozen=True):
    cpu_percent: float = 0.0
    memory: int = 0
    gpus: tuple[GpuLoad, ...] = ()


class SystemMonitor:
    """Remembers each process between two readings: a CPU share is a difference in time."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._children: dict[int, psutil.Process] = {}
        self._has_gpus: bool | None = None
        self.started = self._self.create_time()

    def read(self) -> SystemLoad:
        cpu, memory = 0.0, 0
        for process in self._family():
            try:
                cpu += process.cpu_percent(None)
                memory += process.memory_info().rss
            except psutil.Error:
                continue  # it ended while we looked
        return SystemLoad(cpu, memory, self._gpus())

    def _family(self) -> list[psutil.Process]:
        known = self._children
        self._children = {p.pid: known.get(p.pid, p) for p in self._self.children(recursive=True)}
        return [self._self, *self._children.values()]

    def _gpus(self) -> tuple[GpuLoad, ...]:
        if self._has_gpus is None:
            self._has_gpus = _driver_answers()
        if not self._has_gpus:
            return ()
        try:
            return tuple(_gpu_load(i) for i in range(pynvml.nvmlDeviceGetCount()))
        except pynvml.NVMLError:
            return ()  # a GPU that fell off the bus: its absence from the metrics is the truth


def _driver_answers() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False  # no driver: a machine without GPUs is nothing to report
    return True


def _gpu_load(index: int) -> GpuLoad:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuLoad(str(pynvml.nvmlDeviceGetUUID(handle)), float(rates.gpu), int(memory.used))


class MemoryGauge:
    """Bytes in use by device: by this program and its children of RAM ("cpu"), by anybody of all GPUs ("gpu")."""

    def __init__(self, machine: SystemMonitor | None = None) -> None:
        self._machine = machine or SystemMonitor()

    def read(self) -> dict[str, int]:
        load = self._machine.read()
        return {"cpu": load.memory, "gpu": sum(gpu.memory for gpu in load.gpus)}


# Memory right now: the machine's RAM and each GPU's, and what this process with its children takes of the RAM.


class GpuMemory(Struct, frozen=True, kw_only=True):
    uuid: str
    name: str
    total: int
    used: int
    free: int


class MachineMemory(Struct, frozen=True, kw_only=True):
    """Bytes of the whole machine, and of this process with its children."""

    ram_total: int
    ram_free: int
    ram_used_here: int
    gpus: tuple[GpuMemory, ...] = ()


def read_memory() -> MachineMemory:
    whole, here = psutil.virtual_memory(), psutil.Process()
    return MachineMemory(
        ram_total=int(whole.total),
        ram_free=int(whole.available),
        ram_used_here=sum(map(_resident, [here, *here.children(recursive=True)])),
        gpus=read_gpus(),
    )


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0  # it ended while we looked


def read_gpus() -> tuple[GpuMemory, ...]:
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(map(_gpu_memory, handles))
    except pynvml.NVMLError:
        return ()  # no driver: a machine without GPUs


def _info(handle: Any) -> Any:
    """The newer one does not count as used what the driver keeps for itself; nvidia-smi doesn't either."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _gpu_memory(handle: Any) -> GpuMemory:
    held = _info(handle)
    return GpuMemory(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total=int(held.total),
        used=int(held.used),
        free=int(held.free),
    )


# How much memory is free right now: RAM as far as this process may use it, and each GPU's.

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(*, with_gpus: bool) -> AvailableMemory:
    """`with_gpus`: whether anybody would use them. Where no driver answers the engine has the last word."""
    gpus = {gpu.uuid: gpu.free for gpu in read_gpus()} if with_gpus else {}
    return AvailableMemory(min(psutil.virtual_memory().available, _allowed(_CGROUP)), gpus)


def _allowed(group: Path) -> int:
    """What a container's own limit leaves; files in memory are given back when somebody needs the room."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit: "max" is no number
        return 2**63
    files = int(told.get("inactive_file", 0)) + int(told.get("active_file", 0))
    return max(0, limit - used + files)
