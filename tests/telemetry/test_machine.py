from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pynvml  # type: ignore[import-untyped]
import pytest

from modelyard.telemetry.system import GpuLoad, MemoryGauge, SystemLoad, SystemMonitor


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
