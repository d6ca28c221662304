"""Which weights a file holds: told apart by size, head and samples, and the same wherever the file lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.engines.llama_cpp.kv_snapshot import _HEAD, _SAMPLE, file_identity, sample_offsets

SIZE = _HEAD + 3 * _SAMPLE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(SIZE))
    return path


def test_it_is_the_same_wherever_the_file_lies_and_whenever_it_was_made(file: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.gguf"
    before = file_identity([file])
    file.rename(moved)
    moved.touch()
    assert file_identity([moved]) == before


@pytest.mark.parametrize("place", [0, _HEAD - 1, _HEAD, _HEAD + 2 * _SAMPLE, SIZE - 1])
def test_a_byte_of_the_head_or_of_a_sample_changes_it(file: Path, place: int) -> None:
    before = file_identity([file])
    data = bytearray(SIZE)
    data[place] = 1
    file.write_bytes(data)
    assert file_identity([file]) != before


def test_size_and_parts_change_it(file: Path, tmp_path: Path) -> None:
    (tmp_path / "longer.gguf").write_bytes(bytes(SIZE + 1))
    found = [file_identity([file]), file_identity([tmp_path / "longer.gguf"]), file_identity([file, file])]
    assert len(set(found)) == 3


@pytest.mark.parametrize("size", [0, 1, _HEAD, _HEAD + 1, _HEAD + _SAMPLE, SIZE, 1 << 30, 1 << 40])
def test_samples_lie_in_the_file_and_are_few(size: int) -> None:
    found = sample_offsets(size)
    assert len(found) <= 1100
    assert all(_HEAD <= place < size for place in found)
    assert size <= _HEAD or max(found) + _SAMPLE >= size
