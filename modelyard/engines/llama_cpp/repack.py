"""Which weights llama.cpp copies into another layout when it loads a model on a CPU. Pure, but for `available`.

ggml's CPU backend has extra buffer types whose kernels need the weights in their own order. A tensor goes to the first
type that takes it, else it stays where the file is mapped:

    AMX          int8 matrices for Intel's AMX tiles; some types grow by their sums
    CPU_REPACK   rows interleaved for AVX2, AVX-512 or NEON; the size stays

The mapping of the file is kept from the first to the last tensor that stays in it. Pages of copied tensors in between
are clean and never read again: they are in the resident set until the kernel needs their memory (`page_cache`).
Rules and sizes are those of the pinned release: `ggml-cpu/amx/amx.cpp`, `amx/mmq.cpp`, `repack.cpp`; operations of
tensors: `llama-arch.cpp`.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

from modelyard.engines.llama_cpp.library import library_folder
from modelyard.library.gguf import TensorInfo
from modelyard.plugins import MissingLibrary

_F16, _Q4_0, _Q4_1, _Q8_0, _Q2_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_NL, _IQ4_XS = 1, 2, 3, 8, 10, 12, 13, 14, 20, 23
_MXFP4, _Q1_0 = 39, 41

# ggml's type number → weights and bytes of one block
_BLOCKS = {
    _F16: (1, 2),
    _Q4_0: (32, 18),
    _Q4_1: (32, 20),
    _Q8_0: (32, 34),
    _Q2_K: (256, 84),
    _Q4_K: (256, 144),
    _Q5_K: (256, 176),
    _Q6_K: (256, 210),
    _IQ4_NL: (32, 18),
    _IQ4_XS: (256, 136),
    _MXFP4: (32, 17),
    _Q1_0: (128, 18),
}
_READ_BY_ROWS = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")  # never multiplied
_AMX_MARK = b"amx repack tensor"  # a debug message that only a library with AMX kernels contains


class ExtraBuffer(Struct, frozen=True):
    """A buffer type. `rows` maps each type of tensor that it takes to the number that its rows must be a multiple of;
    `growth` are the bytes that a block becomes longer."""

    name: str
    rows: Mapping[int, int]
    growth: Mapping[int, int] = {}
    dimensions: Mapping[str, range] = {}  # that a tensor of an operation may have

    def takes(self, tensor: TensorInfo) -> bool:
        operation = "MUL_MAT_ID" if "exps" in tensor.name else "MUL_MAT"
        if len(tensor.shape) not in self.dimensions.get(operation, ()) or tensor.kind not in self.rows:
            return False
        columns = 16 if tensor.kind == _F16 else _BLOCKS[tensor.kind][0]
        return tensor.shape[-2] % self.rows[tensor.kind] == 0 and tensor.shape[-1] % columns == 0

    def size(self, tensor: TensorInfo) -> int:
        block, size = _BLOCKS[tensor.kind]
        return math.prod(tensor.shape) // block * (size + self.growth.get(tensor.kind, 0))


_AMX = ExtraBuffer(
    "AMX",
    dict.fromkeys((_F16, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS), 32),
    {_Q8_0: 4, _Q4_K: 4, _Q5_K: 4, _IQ4_XS: 2},
    {"MUL_MAT": range(2, 5)},
)
_REPACK_DIMENSIONS = {"MUL_MAT": range(2, 3), "MUL_MAT_ID": range(3, 4)}
_AVX2 = dict.fromkeys((_Q4_0, _Q4_K, _IQ4_NL, _MXFP4), 8)
_AVX512 = _AVX2 | {_Q2_K: 8}
_NEON = dict.fromkeys((_Q4_K, _Q5_K, _Q6_K), 8) | dict.fromkeys((_Q4_0, _IQ4_NL, _MXFP4, _Q8_0, _Q1_0), 4)


class Weights(Struct, frozen=True):
    """Bytes of a model's weights: what it cannot run without, and the clean pages of copied tensors beside it."""

    needed: int
    page_cache: int = 0


def extra_buffers(features: frozenset[str], *, amx_kernels: bool) -> tuple[ExtraBuffer, ...]:
    """The buffer types of a CPU with these features (names of /proc/cpuinfo), in the order in which they are tried."""
    found = [_AMX] if amx_kernels and {"amx_int8", "avx512_vnni"} <= features else []
    rows = _NEON if "asimddp" in features else _AVX512 if "avx512f" in features else _AVX2 if "avx2" in features else {}
    if rows:
        found.append(ExtraBuffer("CPU_REPACK", rows, dimensions=_REPACK_DIMENSIONS))
    return tuple(found)


def weights(files: Iterable[tuple[int, Sequence[TensorInfo]]], buffers: Sequence[ExtraBuffer], mmap: bool) -> Weights:
    """Of a model in these files, each with its size and its tensors."""
    files = list(files)
    has_output = any(tensor.name == "output.weight" for _, tensors in files for tensor in tensors)
    needed = page_cache = 0
    for size, tensors in files:
        needed += size
        stays: list[int] = []  # offsets
        copied: list[tuple[int, int]] = []  # offset, bytes
        for tensor in tensors:
            is_read = tensor.name.removesuffix(".weight") in _READ_BY_ROWS
            is_tied = tensor.name == "token_embd.weight" and not has_output  # then it is the output matrix, too
            buffer = next((one for one in buffers if one.takes(tensor)), None)
            if buffer is None or (is_read and not is_tied):
                stays.append(tensor.offset)
                continue
            needed += buffer.size(tensor)
            if is_tied:
                stays.append(tensor.offset)
            else:
                block, bytes_ = _BLOCKS[tensor.kind]
                copied.append((tensor.offset, math.prod(tensor.shape) // block * bytes_))
        needed -= sum(bytes_ for _, bytes_ in copied)
        if mmap and stays:
            page_cache += sum(bytes_ for offset, bytes_ in copied if min(stays) < offset < max(stays))
    return Weights(needed, page_cache)


# --- this machine -----------------------------------------------------------------------------------------------------


def available() -> tuple[ExtraBuffer, ...]:
    """Of the installed library on this CPU, found without loading it."""
    try:
        folder = library_folder()
    except MissingLibrary:
        return ()
    return extra_buffers(cpu_features(), amx_kernels=has_amx_kernels(folder))


@cache
def has_amx_kernels(folder: Path) -> bool:
    return any(_AMX_MARK in file.read_bytes() for file in sorted(folder.glob("*ggml-cpu*")) if file.is_file())


@cache
def cpu_features(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", info.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:  # not Linux: every Mac with an ARM CPU has these instructions
        return frozenset({"asimddp"} if platform.machine() == "arm64" else {"avx2"})
    return frozenset(lines[0].split()) if lines else frozenset()
