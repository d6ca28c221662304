"""Memory right now: the machine's RAM and each GPU's, and what this process with its children takes of the RAM."""

from __future__ import annotations

from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped]
from msgspec import Struct


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
        return tuple(map(_gpu, handles))
    except pynvml.NVMLError:
        return ()  # no driver: a machine without GPUs


def _info(handle: Any) -> Any:
    """The newer one does not count as used what the driver keeps for itself; nvidia-smi doesn't either."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _gpu(handle: Any) -> GpuMemory:
    held = _info(handle)
    return GpuMemory(
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total=int(held.total),
        used=int(held.used),
        free=int(held.free),
    )
