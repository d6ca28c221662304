"""Memory of the machine and of its GPUs; a machine without a driver has none."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pynvml  # type: ignore[import-untyped]
import pytest

from modelyard.telemetry.system import (
    GpuLoad,
    GpuMemory,
    MemoryGauge,
    SystemLoad,
    SystemMonitor,
    read_gpus,
    read_memory,
)


def test_this_process_uses_memory_and_has_a_start() -> None:
    machine = SystemMonitor()
    assert machine.read().memory > 1_000_000
    assert machine.started == psutil.Process().create_time()


def test_children_count_and_keep_their_cpu_history_between_readings() -> None:
    machine = SystemMonitor()
    alone = machine.read().memory
    script = "import sys; x = bytearray(64 << 20); sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        assert machine.read().memory > alone + (48 << 20)
        before = machine._children[child.pid]
        machine.read()
        assert machine._children[child.pid] is before
        child.communicate()
    machine.read()
    assert child.pid not in machine._children


def test_a_child_that_ends_while_we_look_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SystemMonitor()

    def gone(self: psutil.Process) -> None:
        raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_info", gone)
    assert machine.read().memory == 0


def _driver(monkeypatch: pytest.MonkeyPatch, init: object) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: "GPU-1")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=42))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=1000))


def test_a_gpu_is_reported_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, lambda: None)
    assert SystemMonitor().read().gpus == (GpuLoad("GPU-1", 42.0, 1000),)


def test_without_a_driver_there_is_no_gpu_and_nobody_asks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_driver() -> None:
        asked.append(os.getpid())
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    _driver(monkeypatch, no_driver)
    machine = SystemMonitor()
    assert (machine.read().gpus, machine.read().gpus) == ((), ())
    assert len(asked) == 1


def test_a_gpu_that_stops_answering_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    _driver(monkeypatch, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lost)
    assert SystemMonitor().read().gpus == ()


def test_the_memory_gauge_adds_all_gpus_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SystemMonitor()
    load = SystemLoad(memory=7, gpus=(GpuLoad("A", 0.0, 3), GpuLoad("B", 0.0, 4)))
    monkeypatch.setattr(machine, "read", lambda: load)
    assert MemoryGauge(machine).read() == {"cpu": 7, "gpu": 7}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "Some GPU")
    held = [SimpleNamespace(total=100, used=30, free=70), SimpleNamespace(total=200, used=0, free=200)]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle, version=None: held[handle])


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_is_told_by_its_uuid() -> None:
    assert read_gpus() == (
        GpuMemory(uuid="GPU-0", name="Some GPU", total=100, used=30, free=70),
        GpuMemory(uuid="GPU-1", name="Some GPU", total=200, used=0, free=200),
    )


@pytest.mark.usefixtures("two_gpus")
def test_what_the_driver_keeps_for_itself_does_not_count_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(total=100, used=36, free=64)
    newer = SimpleNamespace(total=100, reserved=6, used=30, free=64)
    both = {None: older, pynvml.nvmlMemory_v2: newer}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle, version=None: both[version])
    assert {gpu.used for gpu in read_gpus()} == {30}


@pytest.mark.usefixtures("two_gpus")
def test_a_driver_that_knows_the_older_figures_only_is_asked_for_those(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(handle: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=100, used=36, free=64)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", asked)
    assert {gpu.used for gpu in read_gpus()} == {36}


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    assert read_gpus() == ()


def test_a_process_that_ends_while_we_look_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def memory_info(self) -> None:
            raise psutil.NoSuchProcess(1)

    alone = read_memory().ram_used_here
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [Gone()])
    assert read_memory().ram_used_here == pytest.approx(alone, rel=0.2)
    assert read_memory().ram_total > read_memory().ram_free > 0
