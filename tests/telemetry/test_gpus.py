"""Which GPUs a machine has: each source alone, drivers that crash, and machines without any."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.telemetry.gpus import (
    AppleGpu,
    FoundGpus,
    NvidiaDriver,
    NvidiaGpu,
    VulkanGpu,
    find_apple,
    find_gpus,
    find_nvidia,
    find_vulkan,
    pci_display_vendors,
    read_vulkan_report,
)

GIB = 2**30
H200 = NvidiaGpu(name="NVIDIA H200", compute_capability=(9, 0), memory=140 * GIB, free=139 * GIB)
DRIVER = NvidiaDriver(version="580.159.04", cuda=(13, 0), gpus=(H200,))
DEVICES = [
    {"name": "AMD Radeon RX 7900", "vendor": 0x1002, "kind": 2, "api": 1 << 22 | 3 << 12, "memory": 24 * GIB},
    {"name": "llvmpipe", "vendor": 0x10005, "kind": 4, "api": 1 << 22 | 3 << 12, "memory": 2 * GIB},
]


class StandInNvml:
    """The calls of NVIDIA's library that are used."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801 its name there
        pass

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def nvmlInit(self) -> None:  # noqa: N802
        if self._error is not None:
            raise self._error

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _: "NVIDIA H200",
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=140 * GIB, free=139 * GIB),
        }[name]


def test_an_nvidia_gpu_is_described_with_its_driver() -> None:
    assert find_nvidia(StandInNvml()) == DRIVER


def test_a_missing_or_silent_nvidia_driver_is_a_sentence() -> None:
    assert find_nvidia(StandInNvml(StandInNvml.NVMLError_LibraryNotFound())) == "there is no NVIDIA driver"
    found = find_nvidia(StandInNvml(StandInNvml.NVMLError("Driver/library version mismatch")))
    assert found == "the NVIDIA driver does not answer: Driver/library version mismatch"


def test_vulkan_devices_of_any_vendor_are_read_and_drivers_in_software_are_told_apart() -> None:
    found = read_vulkan_report("a driver's own line\n" + json.dumps(DEVICES))
    assert not isinstance(found, str)
    assert found[0] == VulkanGpu(name="AMD Radeon RX 7900", vendor="amd", kind="discrete", memory=24 * GIB, api=(1, 3))
    assert FoundGpus(nvidia="", vulkan=found).vulkan_gpus == found[:1]


@pytest.mark.parametrize("output", ["", "garbage", "[1]", '[{"name": 1}]', "{}garbage"])
def test_a_report_that_cannot_be_read_is_a_sentence(output: str) -> None:
    assert read_vulkan_report(output) == "the list of Vulkan devices cannot be read"


def test_a_driver_that_crashes_or_hangs_does_not_take_this_process_along() -> None:
    crash = find_vulkan((sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert crash == "a Vulkan driver ended its process (code -11)"
    hang = find_vulkan((sys.executable, "-c", "import time; time.sleep(60)"), timeout=0.2)
    assert hang == "a Vulkan driver did not answer for 0 s"


def test_the_real_child_reports_devices_or_a_reason() -> None:
    found = find_vulkan()
    assert found == "there is no Vulkan loader (libvulkan.so.1)" or "Vulkan" in found or isinstance(found, tuple)


def test_cards_without_a_driver_are_found_on_the_bus(tmp_path: Path) -> None:
    for name, kind, vendor in (
        ("00:02.0", "0x030000", "0x1002"),
        ("00:03.0", "0x030200", "0x10de"),
        ("00:04.0", "0x020000", "0x8086"),  # a network card
        ("00:05.0", "broken", "0x8086"),
    ):
        device = tmp_path / name
        device.mkdir()
        (device / "class").write_text(kind + "\n")
        (device / "vendor").write_text(vendor + "\n")
    (tmp_path / "empty").mkdir()
    vendors = pci_display_vendors(tmp_path)
    assert vendors == ("amd", "nvidia")
    assert FoundGpus(nvidia="none", vulkan="none", pci=vendors).without_driver == ("nvidia", "amd")
    assert FoundGpus(nvidia=DRIVER, vulkan="none", pci=vendors).without_driver == ("amd",)
    assert pci_display_vendors(tmp_path / "missing") == ()


def test_only_a_mac_with_apples_processor_has_an_apple_gpu() -> None:
    assert isinstance(find_apple("Darwin", "arm64"), AppleGpu)
    assert find_apple("Darwin", "x86_64") is None
    assert find_apple("Linux", "aarch64") is None


def test_on_a_machine_without_x11_nvidias_driver_is_asked_through_egl() -> None:
    device = VulkanGpu(name="NVIDIA H200", vendor="nvidia", kind="discrete", memory=1, api=(1, 4))
    manifests = []

    def vulkan(env: dict[str, str] | None = None) -> tuple[VulkanGpu, ...] | str:
        if env is None:
            return "there is no Vulkan driver"
        manifests.append(json.loads(Path(env["VK_ADD_DRIVER_FILES"]).read_text()))
        return (device,)

    found = find_gpus(lambda: DRIVER, vulkan)
    assert found.needs_egl
    assert found.vulkan_gpus == (device,)
    assert manifests[0]["ICD"]["library_path"] == "libEGL_nvidia.so.0"
    assert not find_gpus(lambda: "there is no NVIDIA driver", vulkan).needs_egl
