"""Weights that are whole, and some that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines.vllm.model_folder import check_weights
from tests.engines.vllm.stage import weights


def test_whole_file_passes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(10))
    check_weights(tmp_path)


def test_folder_of_another_format_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    check_weights(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [b"", b"\0" * 8, weights(10)[:-1], weights(10) + b"x", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 40, weights(10)[:12]],
    ids=["empty", "zeros", "cut", "longer", "list", "garbage", "cut head"],
)
def test_broken_file_is_named(tmp_path: Path, broken: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(broken)
    with pytest.raises(InvalidRequest, match=str(file)):
        check_weights(tmp_path)
