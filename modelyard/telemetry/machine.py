"""What the machine gives us right now: CPU and memory of this process with its children, and every GPU's load.

A reading takes milliseconds (it walks the process table, and a first look at a GPU starts its driver): read it in a
thread, never on the event loop.
"""

from __future__ import annotations

import psutil
import pynvml  # type: ignore[import-untyped]
from msgspec import Struct


class GpuLoad(Struct, frozen=True):
    uuid: str
    percent: float
    memory: int


class Load(Struct, frozen=True):
    cpu_percent: float = 0.0
    memory: int = 0
    gpus: tuple[GpuLoad, ...] = ()


class Machine:
    """Remembers each process between two readings: a CPU share is a difference in time."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._children: dict[int, psutil.Process] = {}
        self._has_gpus: bool | None = None
        self.started = self._self.create_time()

    def read(self) -> Load:
        cpu, memory = 0.0, 0
        for process in self._family():
            try:
                cpu += process.cpu_percent(None)
                memory += process.memory_info().rss
            except psutil.Error:
                continue  # it ended while we looked
        return Load(cpu, memory, self._gpus())

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

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()

    def read(self) -> dict[str, int]:
        load = self._machine.read()
        return {"cpu": load.memory, "gpu": sum(gpu.memory for gpu in load.gpus)}
