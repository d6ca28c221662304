"""Which weights llama.cpp copies into another memory layout when it loads a model on a CPU. Pure.

ggml's CPU backend has extra buffer types whose kernels need the weights in their own order. A tensor goes to the first
buffer type that takes it; otherwise it stays in the mapping of the file:

    AMX          tiles for Intel's AMX; some types grow, because sums of blocks are stored with them
    CPU_REPACK   interleaved rows for AVX2, AVX-512 or NEON; the size does not change

The file stays mapped from the first to the last tensor that is not copied. The pages of copied tensors in between are
clean and never read again: they are resident until the kernel needs their memory (`page_cache`).
The rules are those of the pinned release: ggml-cpu/amx/amx.cpp, amx/mmq.cpp, repack.cpp, and llama-arch.cpp for the
operation of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from modelyard.engines.llama_cpp.library import cpu_features, has_amx_kernels, library_folder
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
_LOOKUP_TABLES = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")  # read by rows, not multiplied


class ExtraBuffer(Struct, frozen=True):
    """A buffer type. `row_multiples` maps the types of tensors that it takes to the number that their rows must be a
    multiple of; `growth` has the bytes by which a block grows; `dimensions` what a tensor of an operation may have."""

    name: str
    row_multiples: Mapping[int, int]
    dimensions: Mapping[str, range]
    growth: Mapping[int, int] = {}

    def takes(self, tensor: TensorInfo) -> bool:
        operation = "MUL_MAT_ID" if "exps" in tensor.name else "MUL_MAT"
        if len(tensor.shape) not in self.dimensions.get(operation, ()) or tensor.kind not in self.row_multiples:
            return False
        column_multiple = 16 if tensor.kind == _F16 else _BLOCKS[tensor.kind][0]
        return tensor.shape[-2] % self.row_multiples[tensor.kind] == 0 and tensor.shape[-1] % column_multiple == 0

    def size(self, tensor: TensorInfo) -> int:
        weights, size = _BLOCKS[tensor.kind]
        return math.prod(tensor.shape) // weights * (size + self.growth.get(tensor.kind, 0))


_AMX = ExtraBuffer(
    "AMX",
    dict.fromkeys((_F16, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS), 32),
    {"MUL_MAT": range(2, 5)},
    {_Q8_0: 4, _Q4_K: 4, _Q5_K: 4, _IQ4_XS: 2},
)
_AVX2 = dict.fromkeys((_Q4_0, _Q4_K, _IQ4_NL, _MXFP4), 8)
_AVX512 = _AVX2 | {_Q2_K: 8}
_NEON = dict.fromkeys((_Q4_K, _Q5_K, _Q6_K), 8) | dict.fromkeys((_Q4_0, _IQ4_NL, _MXFP4, _Q8_0, _Q1_0), 4)


def extra_buffers(features: frozenset[str], *, amx_kernels: bool) -> tuple[ExtraBuffer, ...]:
    """The buffer types on a CPU with these features (names of /proc/cpuinfo), in the order in which they are tried."""
    found = [_AMX] if amx_kernels and {"amx_int8", "avx512_vnni"} <= features else []
    rows = _NEON if "asimddp" in features else _AVX512 if "avx512f" in features else _AVX2 if "avx2" in features else {}
    if rows:
        found.append(ExtraBuffer("CPU_REPACK", rows, {"MUL_MAT": range(2, 3), "MUL_MAT_ID": range(3, 4)}))
    return tuple(found)


def installed_extra_buffers() -> tuple[ExtraBuffer, ...]:
    """The buffer types of the installed library on this CPU."""
    try:
        return extra_buffers(cpu_features(), amx_kernels=has_amx_kernels(library_folder()))
    except MissingLibrary:
        return ()


class WeightsMemory(Struct, frozen=True):
    """Bytes: what the model cannot run without, and the clean pages of copied tensors."""

    needed: int
    page_cache: int = 0


def weights_memory(
    files: Iterable[tuple[int, Sequence[TensorInfo]]], buffers: Sequence[ExtraBuffer], *, mmap: bool
) -> WeightsMemory:
    """For a model in these files, each with its size and its tensors."""
    files = list(files)
    has_output = any(tensor.name == "output.weight" for _, tensors in files for tensor in tensors)
    needed = page_cache = 0
    for size, tensors in files:
        needed += size
        mapped: list[int] = []  # offsets of tensors that stay in the file
        copied: list[tuple[int, int]] = []  # offset and bytes of those that do not
        for tensor in tensors:
            is_table = tensor.name.removesuffix(".weight") in _LOOKUP_TABLES
            is_tied = tensor.name == "token_embd.weight" and not has_output  # it is also the output matrix
            buffer = next((each for each in buffers if each.takes(tensor)), None)
            if buffer is None or (is_table and not is_tied):
                mapped.append(tensor.offset)
                continue
            needed += buffer.size(tensor)
            if is_tied:
                mapped.append(tensor.offset)
            else:
                weights, bytes_ = _BLOCKS[tensor.kind]
                copied.append((tensor.offset, math.prod(tensor.shape) // weights * bytes_))
        needed -= sum(bytes_ for _, bytes_ in copied)
        if mmap and mapped:
            page_cache += sum(bytes_ for offset, bytes_ in copied if min(mapped) < offset < max(mapped))
    return WeightsMemory(needed, page_cache)
