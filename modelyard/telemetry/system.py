"""CPU, memory and GPU readings: load for the metrics, memory for planning.

A reading takes milliseconds (it walks the process table, and the first access to a GPU starts its driver): call these
functions in a thread, never on the event loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped]
from msgspec import Struct

from modelyard.core.engine import AvailableMemory

_CGROUP = Path("/sys/fs/cgroup")
_MAX_SHARED = 2 << 30  # video memory of a GPU that shares the RAM

# --- load -------------------------------------------------------------------------------------------------------------


class GpuLoad(Struct, frozen=True):
    uuid: str
    percent: float
    memory: int


class SystemLoad(Struct, frozen=True):
    """CPU and memory of this process and its children; GPUs as used by all programs."""

    cpu_percent: float = 0.0
    memory: int = 0
    gpus: tuple[GpuLoad, ...] = ()


class SystemMonitor:
    """Keeps the processes between two readings: psutil computes CPU use as a difference over time."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._children: dict[int, psutil.Process] = {}
        self._has_driver = True  # until the first try shows that there is none
        self.started = self._self.create_time()

    def read(self) -> SystemLoad:
        children = self._self.children(recursive=True)
        self._children = {child.pid: self._children.get(child.pid, child) for child in children}
        cpu, memory = 0.0, 0
        for process in (self._self, *self._children.values()):
            try:
                cpu += process.cpu_percent(None)
                memory += process.memory_info().rss
            except psutil.Error:
                continue  # it exited meanwhile
        return SystemLoad(cpu, memory, self._gpus())

    def _gpus(self) -> tuple[GpuLoad, ...]:
        if not self._has_driver:
            return ()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            self._has_driver = False
            return ()
        try:
            return tuple(map(_gpu_load, _gpu_handles()))
        except pynvml.NVMLError:
            return ()  # a GPU fell off the bus: leave it out of the metrics

    def used_memory(self) -> dict[str, int]:
        """Bytes by device: "cpu" is RAM of this program and its children, "gpu" is all GPUs, by all programs."""
        load = self.read()
        return {"cpu": load.memory, "gpu": sum(gpu.memory for gpu in load.gpus)}


def _gpu_handles() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _gpu_load(handle: Any) -> GpuLoad:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuLoad(str(pynvml.nvmlDeviceGetUUID(handle)), float(rates.gpu), int(memory.used))


# --- memory -----------------------------------------------------------------------------------------------------------


class GpuMemory(Struct, frozen=True, kw_only=True):
    uuid: str
    name: str
    total: int
    used: int
    free: int


class MachineMemory(Struct, frozen=True, kw_only=True):
    """Bytes of the whole machine or container; `ram_used_here` is this process with its children."""

    ram_total: int
    ram_free: int
    ram_used_here: int
    gpus: tuple[GpuMemory, ...] = ()


def read_memory() -> MachineMemory:
    machine, process = psutil.virtual_memory(), psutil.Process()
    return MachineMemory(
        ram_total=min(int(machine.total), _cgroup_limit(_CGROUP)),
        ram_free=min(int(machine.available), _cgroup_free(_CGROUP)),
        ram_used_here=sum(map(_resident, [process, *process.children(recursive=True)])),
        gpus=read_gpus(),
    )


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0  # it exited meanwhile


def read_gpus() -> tuple[GpuMemory, ...]:
    """NVIDIA's and AMD's. The memory of others is known only to the library that uses them."""
    try:
        pynvml.nvmlInit()
        nvidia = tuple(map(_gpu_memory, _gpu_handles()))
    except pynvml.NVMLError:
        nvidia = ()  # no driver, no GPUs
    return (*nvidia, *read_amd_gpus())


def read_amd_gpus(devices: Path = Path("/sys/bus/pci/drivers/amdgpu")) -> tuple[GpuMemory, ...]:
    """From the files of Linux's driver. A GPU that is part of the CPU has little memory of its own: it is left out."""
    found = []
    for device in sorted(devices.glob("*:*:*.*")):
        try:
            total, used = (int((device / f"mem_info_vram_{name}").read_text()) for name in ("total", "used"))
        except (OSError, ValueError):
            continue
        if total > _MAX_SHARED:
            name = f"AMD GPU {device.name}"
            found.append(GpuMemory(uuid=f"amd-{device.name}", name=name, total=total, used=used, free=total - used))
    return tuple(found)


def _gpu_memory(handle: Any) -> GpuMemory:
    try:  # version 2 does not count the driver's reserve as used, like nvidia-smi
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuMemory(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        used=int(memory.used),
        free=int(memory.free),
    )


def free_memory(*, with_gpus: bool) -> AvailableMemory:
    """RAM that this process may still use, and each GPU's free memory. Without a GPU driver `gpus` is empty."""
    gpus = {gpu.uuid: gpu.free for gpu in read_gpus()} if with_gpus else {}
    return AvailableMemory(min(psutil.virtual_memory().available, _cgroup_free(_CGROUP)), gpus)


def total_ram() -> int:
    """The RAM of the machine, or the limit of its container."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
    except (OSError, ValueError):
        limit = 2**63
    return min(int(psutil.virtual_memory().total), limit)


def _cgroup_limit(group: Path) -> int:
    """A container's limit of RAM."""
    try:
        return int((group / "memory.max").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return 2**63


def _cgroup_free(group: Path) -> int:
    """What a container's limit leaves. The page cache counts as free: the kernel reclaims it."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return 2**63
    page_cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return max(0, limit - used + page_cache)
