"""The GPUs of this machine: found through NVIDIA's management library, Vulkan, the PCI bus, or because it is a Mac.

    NVIDIA   name, compute capability, memory, driver and the newest CUDA that the driver runs
    Vulkan   every device that a driver offers, of any vendor. Drivers may crash: a child process asks them
    PCI      vendor ids of the display controllers: a card that no driver offers is named, too
    Apple    each Mac with Apple's own processor has a GPU that shares the memory

Finding takes up to a second: never call it on the event loop or at each start.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import pynvml  # type: ignore[import-untyped]
from msgspec import Struct, structs

Vendor = Literal["nvidia", "amd", "intel", "apple", "other"]
Version = tuple[int, int]

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_VENDORS: dict[int, Vendor] = {0x10DE: "nvidia", 0x1002: "amd", 0x1022: "amd", 0x8086: "intel", 0x106B: "apple"}
_TIMEOUT_S = 20.0  # a driver that starts up takes a second or two


class NvidiaGpu(Struct, frozen=True, kw_only=True):
    name: str
    compute_capability: Version
    memory: int  # bytes
    free: int


class NvidiaDriver(Struct, frozen=True, kw_only=True):
    """`cuda` is the newest CUDA version that the driver runs."""

    version: str
    cuda: Version
    gpus: tuple[NvidiaGpu, ...] = ()


class VulkanGpu(Struct, frozen=True, kw_only=True):
    """`kind` is "cpu" for a driver that computes in software; `memory` is the device's own, or RAM that it shares."""

    name: str
    vendor: Vendor
    kind: Literal["discrete", "integrated", "virtual", "cpu", "other"]
    memory: int
    api: Version


class AppleGpu(Struct, frozen=True, kw_only=True):
    name: str
    memory: int


class FoundGpus(Struct, frozen=True, kw_only=True):
    """What was found. `nvidia` and `vulkan` are the reason, in one sentence, if there is no such driver."""

    nvidia: NvidiaDriver | str
    vulkan: tuple[VulkanGpu, ...] | str
    pci: tuple[Vendor, ...] = ()
    apple: AppleGpu | None = None
    needs_egl: bool = False  # Vulkan finds the NVIDIA GPU only with `EGL_MANIFEST`

    @property
    def vulkan_gpus(self) -> tuple[VulkanGpu, ...]:
        """Without drivers that compute on the CPU: the engine itself is faster there."""
        return () if isinstance(self.vulkan, str) else tuple(gpu for gpu in self.vulkan if gpu.kind != "cpu")

    @property
    def nvidia_gpus(self) -> tuple[NvidiaGpu, ...]:
        return () if isinstance(self.nvidia, str) else self.nvidia.gpus

    @property
    def without_driver(self) -> tuple[Vendor, ...]:
        """Vendors with a card on the bus that neither CUDA nor Vulkan can use."""
        usable = {gpu.vendor for gpu in self.vulkan_gpus} | ({"nvidia"} if self.nvidia_gpus else set())
        known: tuple[Vendor, ...] = ("nvidia", "amd", "intel")
        return tuple(vendor for vendor in known if vendor in self.pci and vendor not in usable)


VulkanFinder = Callable[..., "tuple[VulkanGpu, ...] | str"]


def find_gpus(nvidia: Callable[[], NvidiaDriver | str] | None = None, vulkan: VulkanFinder | None = None) -> FoundGpus:
    ask = vulkan or find_vulkan
    found = FoundGpus(nvidia=(nvidia or find_nvidia)(), vulkan=ask(), pci=pci_display_vendors(), apple=find_apple())
    if found.nvidia_gpus and not any(gpu.vendor == "nvidia" for gpu in found.vulkan_gpus):
        with tempfile.TemporaryDirectory(prefix="modelyard-vulkan-") as folder:
            manifest = Path(folder) / "driver.json"
            manifest.write_text(json.dumps(EGL_MANIFEST), "utf-8")
            again = ask(env={"VK_ADD_DRIVER_FILES": str(manifest)})
        if not isinstance(again, str) and any(gpu.vendor == "nvidia" for gpu in again):
            return structs.replace(found, vulkan=again, needs_egl=True)
    return found


# --- NVIDIA -----------------------------------------------------------------------------------------------------------


def find_nvidia(nvml: Any = pynvml) -> NvidiaDriver | str:
    """`nvml` is NVIDIA's management library or a stand-in."""
    try:
        nvml.nvmlInit()
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_nvidia_gpu(nvml, handle) for handle in handles)
        return NvidiaDriver(
            version=str(nvml.nvmlSystemGetDriverVersion()), cuda=(cuda // 1000, cuda % 1000 // 10), gpus=gpus
        )
    except nvml.NVMLError_LibraryNotFound:
        return "there is no NVIDIA driver"
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer: {error}"


def _nvidia_gpu(nvml: Any, handle: Any) -> NvidiaGpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return NvidiaGpu(
        name=str(nvml.nvmlDeviceGetName(handle)),
        compute_capability=(int(major), int(minor)),
        memory=int(memory.total),
        free=int(memory.free),
    )


# --- the PCI bus ------------------------------------------------------------------------------------------------------


def pci_display_vendors(devices: Path = _PCI_DEVICES) -> tuple[Vendor, ...]:
    """Vendors of the display controllers and 3D accelerators, sorted; nothing where there is no such folder."""
    found = set[Vendor]()
    for device in devices.glob("*"):
        try:
            kind, vendor = (int((device / name).read_text(), 16) for name in ("class", "vendor"))
        except (OSError, ValueError):
            continue
        if kind >> 16 == 0x03:
            found.add(_VENDORS.get(vendor, "other"))
    return tuple(sorted(found))


# --- Apple ------------------------------------------------------------------------------------------------------------


def find_apple(system: str | None = None, machine: str | None = None) -> AppleGpu | None:
    if (system or platform.system(), machine or platform.machine()) != ("Darwin", "arm64"):
        return None
    return AppleGpu(name="Apple GPU", memory=int(psutil.virtual_memory().total))


# NVIDIA's own manifest names a library that needs X11. On a machine without it the same driver starts through EGL.
EGL_MANIFEST = {
    "file_format_version": "1.0.0",
    "ICD": {"library_path": "libEGL_nvidia.so.0", "api_version": "1.3.0"},
}

# --- Vulkan, the parent -----------------------------------------------------------------------------------------------


def find_vulkan(
    child: Sequence[str] = (sys.executable, "-m", "modelyard.telemetry.gpus"),
    timeout: float = _TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> tuple[VulkanGpu, ...] | str:
    """`env` has additional variables."""
    try:
        done = subprocess.run(  # noqa: S603
            child,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=os.environ | (env or {}),
        )
    except subprocess.TimeoutExpired:
        return f"a Vulkan driver did not answer for {timeout:.0f} s"
    if done.returncode:
        return f"a Vulkan driver ended its process (code {done.returncode})"
    return read_vulkan_report(done.stdout)


def read_vulkan_report(output: str) -> tuple[VulkanGpu, ...] | str:
    """Of the child. Drivers write to standard output, too: the report is the last line."""
    try:
        report = json.loads(output.strip().splitlines()[-1])
        if isinstance(report, str):
            return report
        return tuple(_vulkan_gpu(each) for each in report)
    except (IndexError, ValueError, KeyError, TypeError):
        return "the list of Vulkan devices cannot be read"


def _vulkan_gpu(device: Mapping[str, Any]) -> VulkanGpu:
    kinds = dict(enumerate(("other", "integrated", "discrete", "virtual", "cpu")))
    return VulkanGpu(
        name=device["name"],
        vendor=_VENDORS.get(device["vendor"], "other"),
        kind=kinds.get(device["kind"], "other"),  # type: ignore[arg-type]
        memory=device["memory"],
        api=(device["api"] >> 22 & 0x7F, device["api"] >> 12 & 0x3FF),
    )


# --- Vulkan, the child ------------------------------------------------------------------------------------------------

_API_1_2 = 1 << 22 | 2 << 12  # what ggml asks for
_LOADERS = ("libvulkan.so.1", "vulkan-1.dll", "libvulkan.1.dylib")
_PROPERTIES_SIZE = 4096  # VkPhysicalDeviceProperties has 824 bytes
_DEVICE_LOCAL = 1
_MAX_TYPES, _MAX_HEAPS = 32, 16


class _ApplicationInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api", ctypes.c_uint32),
    )


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


class _DeviceHeader(ctypes.Structure):
    """How VkPhysicalDeviceProperties begins."""

    _fields_ = (
        ("api", ctypes.c_uint32),
        ("driver", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_int),
        ("name", ctypes.c_char * 256),
    )


class _MemoryType(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint32), ("heap", ctypes.c_uint32))


class _MemoryHeap(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint64), ("flags", ctypes.c_uint32))


class _MemoryProperties(ctypes.Structure):
    _fields_ = (
        ("type_count", ctypes.c_uint32),
        ("types", _MemoryType * _MAX_TYPES),
        ("heap_count", ctypes.c_uint32),
        ("heaps", _MemoryHeap * _MAX_HEAPS),
    )


def list_vulkan_devices() -> list[dict[str, Any]] | str:
    """The raw numbers of each device, or why there are none. A driver may crash in here."""
    library = _load_vulkan()
    if library is None:
        return "there is no Vulkan loader (libvulkan.so.1)"
    application = _ApplicationInfo(type=0, api=_API_1_2)
    create = _InstanceCreateInfo(type=1, application=ctypes.pointer(application))
    instance = ctypes.c_void_p()
    if code := library.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)):
        return "there is no Vulkan driver" if code == -9 else f"Vulkan does not start (error {code})"
    count = ctypes.c_uint32()
    library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    devices = (ctypes.c_void_p * count.value)()
    library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
    return [_describe(library, ctypes.c_void_p(device)) for device in devices[: count.value]]


def _load_vulkan() -> Any:
    for name in (*_LOADERS, ctypes.util.find_library("vulkan")):
        try:
            if name:
                return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _describe(library: Any, device: ctypes.c_void_p) -> dict[str, Any]:
    room = ctypes.create_string_buffer(_PROPERTIES_SIZE)
    library.vkGetPhysicalDeviceProperties(device, room)
    header = _DeviceHeader.from_buffer(room)
    memory = _MemoryProperties()
    library.vkGetPhysicalDeviceMemoryProperties(device, ctypes.byref(memory))
    heaps = memory.heaps[: memory.heap_count]
    return {
        "name": header.name.decode("utf-8", "replace"),
        "vendor": header.vendor,
        "kind": header.kind,
        "api": header.api,
        "memory": sum(heap.size for heap in heaps if heap.flags & _DEVICE_LOCAL),
    }


def main() -> None:
    report = json.dumps(list_vulkan_devices())
    sys.stdout.write(report + "\n")
    sys.stdout.flush()
    os._exit(0)  # a driver's exit handlers may crash


if __name__ == "__main__":
    main()
