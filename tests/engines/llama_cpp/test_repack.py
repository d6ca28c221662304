"""Which weights llama.cpp copies into extra buffers: by CPU, by type, and in the installed library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from modelyard.engines.llama_cpp import library, loading, repack, selftest
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.estimate import read_model_shape
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.repack import WeightsMemory, extra_buffers, weights_memory
from modelyard.library.gguf import TensorInfo
from tests.engines.llama_cpp.helpers import model_buffers

AVX2 = frozenset({"avx", "avx2"})
AVX512 = AVX2 | {"avx512f", "avx512_vnni"}
AMX = AVX512 | {"amx_tile", "amx_int8"}
NEON = frozenset({"asimd", "asimddp"})
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
Q4_0, Q8_0 = TYPES["Q4_0"], TYPES["Q8_0"]


def matrix(kind: int, *shape: int, name: str = "blk.0.ffn_up.weight", offset: int = 0) -> TensorInfo:
    return TensorInfo(name, shape or (512, 256), kind, offset)


def buffer_of(tensor: TensorInfo, features: frozenset[str], *, amx_kernels: bool = True) -> str | None:
    return next((each.name for each in extra_buffers(features, amx_kernels=amx_kernels) if each.takes(tensor)), None)


@pytest.mark.parametrize(
    ("features", "amx", "repack"),
    [
        (frozenset[str](), "", ""),
        (AVX2, "", "Q4_0 Q4_K"),
        (AVX512, "", "Q4_0 Q2_K Q4_K"),
        (AMX, "F16 Q4_0 Q4_1 Q8_0 Q4_K Q6_K", "Q2_K"),
        (NEON, "", "Q4_0 Q8_0 Q4_K Q6_K"),
    ],
)
def test_each_cpu_copies_the_types_that_it_has_kernels_for(features: frozenset[str], amx: str, repack: str) -> None:
    found = {name: buffer_of(matrix(kind), features) for name, kind in TYPES.items()}
    assert " ".join(name for name in TYPES if found[name] == "AMX") == amx
    assert " ".join(name for name in TYPES if found[name] == "CPU_REPACK") == repack


def test_a_library_without_amx_kernels_uses_none_on_a_cpu_that_has_them() -> None:
    assert buffer_of(matrix(Q4_0), AMX, amx_kernels=False) == "CPU_REPACK"
    assert buffer_of(matrix(Q8_0), AMX, amx_kernels=False) is None


def test_experts_and_unaligned_shapes_use_other_buffers_or_none() -> None:
    experts = matrix(Q4_0, 8, 512, 256, name="blk.0.ffn_up_exps.weight")
    assert buffer_of(experts, AMX) == "CPU_REPACK"
    assert buffer_of(matrix(Q8_0, 8, 512, 256, name=experts.name), AMX) is None
    assert buffer_of(matrix(Q4_0, 8, 512, 256, name="blk.0.attn_k_b.weight"), AMX) == "AMX"
    assert buffer_of(matrix(Q4_0, 8, 512, 256, name="blk.0.attn_k_b.weight"), AVX2) is None
    assert buffer_of(matrix(Q4_0, 24, 256), AMX) == "CPU_REPACK"  # rows come in 32
    assert buffer_of(matrix(Q4_0, 12, 256), AMX) is None  # or in 8
    assert buffer_of(matrix(Q4_0, 256), AMX) is None


# --- the sum ----------------------------------------------------------------------------------------------------------

BYTES = 512 * 256 // 32 * 34  # of one Q8_0 matrix


def q8_model(*, tied: bool) -> list[TensorInfo]:
    names = ["token_embd", "blk.0.attn_q", "blk.0.ffn_up", "output_norm"] + ([] if tied else ["output"])
    kinds = [0 if name.endswith("norm") else Q8_0 for name in names]
    return [
        TensorInfo(f"{name}.weight", (512, 256) if kind else (256,), kind, 1000 + at * BYTES)
        for at, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]


@pytest.mark.parametrize("features", [AVX2, AVX512, frozenset[str]()])
def test_without_copies_the_weights_are_the_file(features: frozenset[str]) -> None:
    files = [(10 * BYTES, q8_model(tied=False))]
    assert weights_memory(files, extra_buffers(features, amx_kernels=True), mmap=True) == WeightsMemory(10 * BYTES)


def test_copied_weights_count_in_their_new_size_and_their_pages_in_the_file_as_page_cache() -> None:
    files, buffers = [(10 * BYTES, q8_model(tied=False))], extra_buffers(AMX, amx_kernels=True)
    grown = 512 * 256 // 32 * 4  # four bytes for each block of 34
    # Two matrices lie between the embedding and the norm, which stay; the output lies behind them: it is unmapped.
    assert weights_memory(files, buffers, mmap=True) == WeightsMemory(10 * BYTES + 3 * grown, 2 * BYTES)
    assert weights_memory(files, buffers, mmap=False) == WeightsMemory(10 * BYTES + 3 * grown)


def test_a_tied_embedding_is_held_twice() -> None:
    files, buffers = [(10 * BYTES, q8_model(tied=True))], extra_buffers(AMX, amx_kernels=True)
    grown = 512 * 256 // 32 * 4
    assert weights_memory(files, buffers, mmap=True) == WeightsMemory(11 * BYTES + 3 * grown, 2 * BYTES)


def test_the_files_of_a_split_model_are_mapped_separately() -> None:
    first, second = q8_model(tied=False)[:2], q8_model(tied=False)[2:]
    buffers = extra_buffers(AMX, amx_kernels=True)
    parts = weights_memory([(4 * BYTES, first), (6 * BYTES, second)], buffers, mmap=True)
    assert parts.needed == weights_memory([(10 * BYTES, first + second)], buffers, mmap=True).needed
    assert parts.page_cache == 0  # one tensor stays in each file, so nothing lies between two of them


# --- this machine -----------------------------------------------------------------------------------------------------


def test_cpu_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    for line in ("flags\t\t: fpu avx2 amx_int8", "Features\t: fp avx2 amx_int8"):
        (tmp_path / line[:5]).write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\n{line}\n")
        assert {"avx2", "amx_int8"} < library.cpu_features(tmp_path / line[:5])
    (tmp_path / "odd").write_text("processor: 0\n")
    assert library.cpu_features(tmp_path / "odd") == frozenset()


def test_amx_kernels_are_found_in_the_librarys_file(tmp_path: Path) -> None:
    for name, code in (("with", b"\x7fELF..amx repack tensor %s"), ("without", b"\x7fELF..CPU_REPACK")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libggml-cpu.so").write_bytes(code)
    assert library.has_amx_kernels(tmp_path / "with")
    assert not library.has_amx_kernels(tmp_path / "without")


def test_the_installed_library_has_the_expected_buffer_types() -> None:
    library = lib._lib
    library.ggml_backend_dev_by_type.restype = library.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_buft_name.restype = ctypes.c_char_p
    device = ctypes.c_void_p(library.ggml_backend_dev_by_type(0))
    registry = ctypes.c_void_p(library.ggml_backend_dev_backend_reg(device))
    address = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    types: Any = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    names = []
    while types[len(names)]:
        names.append(library.ggml_backend_buft_name(ctypes.c_void_p(types[len(names)])).decode())
    assert [buffer.name for buffer in repack.installed_extra_buffers()] == names


@pytest.mark.parametrize("mmap", [True, False])
def test_a_model_with_every_type_takes_the_expected_memory_on_this_cpu(
    tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    selftest.write_tiny_model(file)
    expected = weights_memory(read_model_shape(file).files, repack.installed_extra_buffers(), mmap=mmap)
    with model_buffers(monkeypatch) as taken:
        lib.llama_model_free(loading.load_model(file, Options(path=str(file), use_mmap=mmap), lambda _: True))
    assert expected.needed + expected.page_cache == pytest.approx(taken["model"], rel=0.02)
