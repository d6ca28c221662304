from __future__ import annotations

from modelyard.core.engine import MemoryEstimate
from modelyard.core.pool import DeviceSnapshot
from modelyard.http.admin import schemas
from modelyard.telemetry.system import GpuMemory, MachineMemory

GIB = 2**30
RAM = MachineMemory(ram_total=16 * GIB, ram_free=10 * GIB, ram_used_here=0)
GPU = MachineMemory(
    ram_total=16 * GIB,
    ram_free=10 * GIB,
    ram_used_here=0,
    gpus=(GpuMemory(uuid="g", name="G", total=8 * GIB, used=GIB, free=7 * GIB),),
)


def estimate(gib: int, machine: MachineMemory, *devices: DeviceSnapshot, device: str = "cpu") -> dict[str, object]:
    found = schemas.estimate("m", MemoryEstimate(gib * GIB, device=device), machine, devices)
    return {name: found[name] for name in ("free", "limit", "fits", "possible")}


def test_without_a_limit_the_machine_decides() -> None:
    assert estimate(9, RAM) == {"free": 10 * GIB, "limit": None, "fits": True, "possible": True}
    assert estimate(12, RAM) == {"free": 10 * GIB, "limit": None, "fits": False, "possible": True}
    assert estimate(17, RAM)["possible"] is False


def test_the_memory_limit_and_what_other_models_have_of_it_count() -> None:
    limited = DeviceSnapshot("cpu", limit=6 * GIB, taken=2 * GIB)
    assert estimate(4, RAM, limited) == {"free": 4 * GIB, "limit": 6 * GIB, "fits": True, "possible": True}
    assert estimate(5, RAM, limited) == {"free": 4 * GIB, "limit": 6 * GIB, "fits": False, "possible": True}
    assert estimate(7, RAM, limited) == {"free": 4 * GIB, "limit": 6 * GIB, "fits": False, "possible": False}


def test_a_gpu_has_its_own_limit() -> None:
    devices = (DeviceSnapshot("cpu", limit=GIB, taken=0), DeviceSnapshot("gpu", limit=5 * GIB, taken=0))
    assert estimate(4, GPU, *devices, device="gpu") == {
        "free": 5 * GIB,
        "limit": 5 * GIB,
        "fits": True,
        "possible": True,
    }
    assert estimate(6, GPU, *devices, device="gpu")["possible"] is False
