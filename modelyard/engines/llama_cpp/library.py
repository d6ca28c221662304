"""The llama.cpp library that is used: its release, and what it can do. Nothing here loads it.

A library that was built for another CPU may kill the process that loads it (`selftest.py` finds out in a child
process), so its features are read from its files.
"""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

from msgspec import structs

from modelyard.core.engine import AvailableMemory
from modelyard.library.llama_cpp_package import library_folder
from modelyard.plugins import MissingLibrary

# --- GPUs -------------------------------------------------------------------------------------------------------------

_GPU_BACKENDS = ("cann", "cuda", "hip", "metal", "musa", "opencl", "sycl", "vulkan")


@cache
def has_gpu_backend(folder: Path) -> bool:
    return bool(gpu_plugins(folder))


def gpu_plugins(folder: Path) -> list[Path]:
    return [file for backend in _GPU_BACKENDS for file in sorted(folder.glob(f"*ggml-{backend}*"))]


def offloads_to_gpu(layers: int | str) -> bool:
    """Whether a model with this n_gpu_layers uses a GPU; without a library it does not."""
    try:
        return layers != 0 and has_gpu_backend(library_folder())
    except MissingLibrary:
        return False


def visible_memory(machine: AvailableMemory) -> AvailableMemory:
    """What the library can use. A library for CPUs puts models into RAM even if there are GPUs."""
    return machine if offloads_to_gpu(-1) else structs.replace(machine, gpus={})


# --- the CPU ----------------------------------------------------------------------------------------------------------

_AMX_MARKER = b"amx repack tensor"  # a debug message that only a library with AMX kernels contains


@cache
def has_amx_kernels(folder: Path) -> bool:
    return any(_AMX_MARKER in file.read_bytes() for file in sorted(folder.glob("*ggml-cpu*")))


@cache
def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's instruction sets by their names in /proc/cpuinfo."""
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:  # not Linux; every ARM Mac has these instructions
        return frozenset({"asimddp"} if platform.machine() == "arm64" else {"avx2"})
    return frozenset(lines[0].split()) if lines else frozenset()


# --- fp16 arithmetic --------------------------------------------------------------------------------------------------
#
# On a CPU with AVX512-FP16 the pinned release sums fp16 values in blocks of 128 and takes the remainder one by one.
# Then flash attention over heads of 64, 80 or 96 decodes at less than half the speed at depth. No API says whether the
# library does that, and a measurement would depend on the machine's load, so its code is searched for the instructions.

_FP16_BLOCK = 128
# EVEX in map 6 with a vector of 512 bits and no wide operand, then VFMADD132PH, VFMADD213PH or VFMADD231PH.
_SECOND, _THIRD, _FOURTH = (
    b"".join(b"\\x%02x" % byte for byte in range(256) if byte & mask == bits)
    for mask, bits in ((0x0F, 0x06), (0x87, 0x05), (0x60, 0x40))
)
_FP16_FMA = re.compile(rb"\x62[%b][%b][%b][\x98\xa8\xb8]" % (_SECOND, _THIRD, _FOURTH), re.DOTALL)
_MIN_FP16_FMAS = 2  # one match may be data


def is_flash_attention_slow(head_size: int, folder: Path) -> bool:
    return head_size % _FP16_BLOCK != 0 and uses_fp16_arithmetic(folder)


@cache
def uses_fp16_arithmetic(folder: Path) -> bool:
    return any(count_fp16_fma(file.read_bytes()) >= _MIN_FP16_FMAS for file in sorted(folder.glob("*ggml-cpu*.so")))


def count_fp16_fma(code: bytes) -> int:
    return sum(1 for _ in _FP16_FMA.finditer(code))
