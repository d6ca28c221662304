"""The quality loss of coarser compute types on a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard_ct2.loss import loss
from modelyard_ct2.model_folder import WEIGHTS
from tests.engines.ct2.helpers import spec


def measure(compute_type: str) -> Loss:
    ids = [n % 1000 + 100 for n in range(0, 280, 7)]
    return loss(spec(compute_type=compute_type), spec(compute_type="float32"), ids)


def test_the_same_compute_type_loses_nothing_and_a_coarser_one_does() -> None:
    same, coarse = measure("float32"), measure("int8")
    assert same.rise == pytest.approx(0, abs=1e-6)
    assert same.divergence == pytest.approx(0, abs=1e-6)
    assert coarse.divergence is not None
    assert coarse.divergence > 0
    assert coarse.reference == same.perplexity


def test_folder_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    (tmp_path / "vocabulary.json").write_text('["a", "b"]')
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        loss(spec(path=str(tmp_path)), spec(), [0, 1])
