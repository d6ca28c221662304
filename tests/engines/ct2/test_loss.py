"""What coarser numbers cost a CTranslate2 model on a text."""

from __future__ import annotations

from functools import cache

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard.engines.ct2 import model_folder as folder
from modelyard.engines.ct2.loss import loss
from tests.engines.ct2.stage import model_folder, spec


@cache
def lost(kind: str) -> Loss:
    ids = [n % 1000 + 100 for n in range(0, 280, 7)]
    assert max(ids) < len(folder.read_vocabulary(model_folder()))
    return loss(spec(compute_type=kind), spec(compute_type="float32"), ids)


def test_the_same_numbers_lose_nothing():
    same = lost("float32")
    assert same.rise == pytest.approx(0, abs=1e-6)
    assert same.divergence == pytest.approx(0, abs=1e-6)


def test_coarser_numbers_move_the_odds():
    coarse = lost("int8")
    assert coarse.divergence is not None
    assert coarse.divergence > 0
    assert coarse.reference == lost("float32").perplexity


def test_a_folder_that_cannot_be_loaded_says_so(tmp_path):
    (tmp_path / folder.WEIGHTS).write_bytes(b"nothing")
    (tmp_path / "vocabulary.json").write_text('["a", "b"]')
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        loss(spec(path=str(tmp_path)), spec(), [0, 1])
