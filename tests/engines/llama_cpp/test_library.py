"""What the library's files tell: its GPU backends and its fp16 arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import library as halves
from modelyard.engines.llama_cpp.library import visible_memory
from tests.engines.llama_cpp.helpers import model_file

MACHINE = AvailableMemory(1 << 34, {"GPU-0": 1 << 34})


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    (tmp_path / "libggml-cpu.so").touch()
    return tmp_path


def test_a_library_without_gpu_backend_does_not_see_gpus(library: Path) -> None:
    assert not llama_cpp.own_process(llama_cpp.Options(path=str(model_file())))
    assert visible_memory(MACHINE) == AvailableMemory(1 << 34)
    spec = EngineSpec("m", llama_cpp.Options(path=str(model_file())), {"main": CacheInfo(512)})
    assert llama_cpp.estimate(spec, MACHINE).device == "cpu"


@pytest.mark.parametrize("file", ["libggml-cuda.so", "libggml-vulkan.so.0", "libggml-metal.dylib"])
def test_a_library_with_a_gpu_backend_sees_gpus(library: Path, file: str) -> None:
    (library / file).touch()
    assert visible_memory(MACHINE) is MACHINE
    spec = EngineSpec("m", llama_cpp.Options(path=str(model_file())), {"main": CacheInfo(512)})
    assert llama_cpp.estimate(spec, MACHINE).device == "gpu"


@pytest.mark.parametrize(
    ("fields", "own"),
    [({}, True), ({"n_gpu_layers": 4}, True), ({"n_gpu_layers": 0}, False), ({"gguf_n_gpu_layers": 0}, False)],
)
def test_a_model_on_a_gpu_gets_its_own_process(library: Path, fields: dict[str, Any], own: bool) -> None:
    (library / "libggml-cuda.so").touch()
    assert llama_cpp.own_process(llama_cpp.Options(path=str(model_file()), **fields)) is own


# --- fp16 arithmetic --------------------------------------------------------------------------------------------------

# vfmadd231ph zmm0, zmm1, zmm2 · vfmadd213ph zmm16, zmm17, [rax] · vfmadd132ph zmm1, zmm2, zmm3
FP16_FMAS = [b"\x62\xf6\x75\x48\xb8\xc2", b"\x62\xe6\x75\x40\xa8\x00", b"\x62\xf6\x6d\x48\x98\xcb"]
# vfmadd231ps zmm0, zmm1, zmm2 · vfmadd231pd zmm0, zmm1, zmm2 · vfmadd231ph ymm0, ymm1, ymm2
OTHER_FMAS = [b"\x62\xf2\x75\x48\xb8\xc2", b"\x62\xf2\xf5\x48\xb8\xc2", b"\x62\xf6\x75\x28\xb8\xc2"]


@pytest.mark.parametrize("code", FP16_FMAS)
def test_an_fp16_multiply_add_is_found(code: bytes) -> None:
    assert halves.count_fp16_fma(b"\x90" + code + b"\xc3") == 1


@pytest.mark.parametrize("code", OTHER_FMAS)
def test_other_multiply_adds_do_not_count(code: bytes) -> None:
    assert halves.count_fp16_fma(code * 100) == 0


def write_library(folder: Path, code: bytes) -> Path:
    folder.mkdir()
    (folder / "libggml-cpu.so").write_bytes(b"\x7fELF" + code)
    return folder


def test_heads_that_are_multiples_of_a_block_are_not_slow(tmp_path: Path) -> None:
    folder = write_library(tmp_path / "lib", b"".join(FP16_FMAS))
    assert [head for head in (0, 64, 80, 96, 128, 192, 256) if halves.is_flash_attention_slow(head, folder)] == [
        64,
        80,
        96,
        192,
    ]


def test_a_library_without_fp16_arithmetic_is_not_slow(tmp_path: Path) -> None:
    assert not halves.is_flash_attention_slow(64, write_library(tmp_path / "lib", b"".join(OTHER_FMAS)))


def test_a_single_match_may_be_data(tmp_path: Path) -> None:
    assert not halves.is_flash_attention_slow(64, write_library(tmp_path / "lib", FP16_FMAS[0]))
