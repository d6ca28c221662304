"""Libraries that add half-precision values up are told by their instructions."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.engines.llama_cpp import library as halves

# vfmadd231ph zmm0, zmm1, zmm2 · vfmadd213ph zmm16, zmm17, [rax] · vfmadd132ph zmm1, zmm2, zmm3
HALVES = [b"\x62\xf6\x75\x48\xb8\xc2", b"\x62\xe6\x75\x40\xa8\x00", b"\x62\xf6\x6d\x48\x98\xcb"]
# vfmadd231ps zmm0, zmm1, zmm2 · vfmadd231pd zmm0, zmm1, zmm2 · vfmadd231ph ymm0, ymm1, ymm2
OTHERS = [b"\x62\xf2\x75\x48\xb8\xc2", b"\x62\xf2\xf5\x48\xb8\xc2", b"\x62\xf6\x75\x28\xb8\xc2"]


@pytest.mark.parametrize("code", HALVES)
def test_a_multiply_add_of_halves_is_found(code: bytes) -> None:
    assert halves.count_fp16_fma(b"\x90" + code + b"\xc3") == 1


@pytest.mark.parametrize("code", OTHERS)
def test_other_multiply_adds_are_none_of_it(code: bytes) -> None:
    assert halves.count_fp16_fma(code * 100) == 0


def library(folder: Path, code: bytes) -> Path:
    folder.mkdir()
    (folder / "libggml-cpu.so").write_bytes(b"\x7fELF" + code)
    return folder


def test_heads_of_whole_blocks_are_never_slow(tmp_path: Path) -> None:
    folder = library(tmp_path / "lib", b"".join(HALVES))
    assert [head for head in (0, 64, 80, 96, 128, 192, 256) if halves.is_flash_attention_slow(head, folder)] == [
        64,
        80,
        96,
        192,
    ]


def test_a_library_without_them_is_slow_with_no_head(tmp_path: Path) -> None:
    assert not halves.is_flash_attention_slow(64, library(tmp_path / "lib", b"".join(OTHERS)))


def test_one_by_chance_is_not_enough(tmp_path: Path) -> None:
    assert not halves.is_flash_attention_slow(64, library(tmp_path / "lib", HALVES[0]))
