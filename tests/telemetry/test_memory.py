"""Memory of the machine and of its GPUs; a machine without a driver has none."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pynvml  # type: ignore[import-untyped]
import pytest

from modelyard.telemetry.system import GpuMemory, read_gpus, read_memory


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
