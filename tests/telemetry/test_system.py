from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml  # type: ignore[import-untyped]
import pytest

from modelyard.telemetry import system
from modelyard.telemetry.system import (
    GpuLoad,
    GpuMemory,
    SystemLoad,
    SystemMonitor,
    free_memory,
    read_amd_gpus,
    read_gpus,
    read_memory,
)


def test_this_process_has_memory_and_a_start_time() -> None:
    monitor = SystemMonitor()
    assert monitor.read().memory > 1_000_000
    assert monitor.started == psutil.Process().create_time()


def test_children_are_included_and_keep_their_cpu_history() -> None:
    monitor = SystemMonitor()
    alone = monitor.read().memory
    script = "import sys; x = bytearray(64 << 20); sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        assert monitor.read().memory > alone + (48 << 20)
        before = monitor._children[child.pid]
        monitor.read()
        assert monitor._children[child.pid] is before
        child.communicate()
    monitor.read()
    assert child.pid not in monitor._children


def test_a_child_that_exits_during_the_reading_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = SystemMonitor()

    def gone(self: psutil.Process) -> None:
        raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_info", gone)
    assert monitor.read().memory == 0


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


def test_a_missing_driver_is_tried_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def no_driver() -> None:
        attempts.append(os.getpid())
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    _driver(monkeypatch, no_driver)
    monitor = SystemMonitor()
    assert (monitor.read().gpus, monitor.read().gpus) == ((), ())
    assert len(attempts) == 1


def test_a_lost_gpu_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    _driver(monkeypatch, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lost)
    assert SystemMonitor().read().gpus == ()


def test_the_used_memory_sums_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = SystemMonitor()
    load = SystemLoad(memory=7, gpus=(GpuLoad("A", 0.0, 3), GpuLoad("B", 0.0, 4)))
    monkeypatch.setattr(monitor, "read", lambda: load)
    assert monitor.used_memory() == {"cpu": 7, "gpu": 7}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "Some GPU")
    memory = [SimpleNamespace(total=100, used=30, free=70), SimpleNamespace(total=200, used=0, free=200)]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle, version=None: memory[handle])


@pytest.mark.usefixtures("two_gpus")
def test_the_memory_of_each_gpu_is_reported_by_its_uuid() -> None:
    assert read_gpus() == (
        GpuMemory(uuid="GPU-0", name="Some GPU", total=100, used=30, free=70),
        GpuMemory(uuid="GPU-1", name="Some GPU", total=200, used=0, free=200),
    )


@pytest.mark.usefixtures("two_gpus")
def test_the_reserve_of_the_driver_does_not_count_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(total=100, used=36, free=64)
    newer = SimpleNamespace(total=100, reserved=6, used=30, free=64)
    both = {None: older, pynvml.nvmlMemory_v2: newer}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle, version=None: both[version])
    assert {gpu.used for gpu in read_gpus()} == {30}


@pytest.mark.usefixtures("two_gpus")
def test_an_old_driver_reports_its_older_memory_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_info(handle: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=100, used=36, free=64)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory_info)
    assert {gpu.used for gpu in read_gpus()} == {36}


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    assert read_gpus() == ()


def test_a_process_that_exits_during_the_reading_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def memory_info(self) -> None:
            raise psutil.NoSuchProcess(1)

    alone = read_memory().ram_used_here
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [Gone()])
    assert read_memory().ram_used_here == pytest.approx(alone, rel=0.2)
    assert read_memory().ram_total > read_memory().ram_free > 0


def test_the_limit_of_a_container_bounds_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 100\nactive_file 300\n")
    assert free_memory(with_gpus=False).ram_free == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(with_gpus=False).ram_free > 1_000_000


def test_amds_driver_tells_the_memory_of_a_card_but_not_of_a_shared_one(tmp_path: Path) -> None:
    for name, total, used in (("0000:03:00.0", 24 << 30, 4 << 30), ("0000:0a:00.0", 512 << 20, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mem_info_vram_total").write_text(f"{total}\n")
        (tmp_path / name / "mem_info_vram_used").write_text(f"{used}\n")
    (tmp_path / "0000:0b:00.0").mkdir()
    (found,) = read_amd_gpus(tmp_path)
    assert (found.uuid, found.total, found.free) == ("amd-0000:03:00.0", 24 << 30, 20 << 30)
    assert read_amd_gpus(tmp_path / "missing") == ()
