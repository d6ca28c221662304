"""The loss of quantized KV caches: none without quantization, and more with coarser types."""

from __future__ import annotations

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard.engines.llama_cpp.loss import log_probabilities, loss
from tests.engines.llama_cpp.helpers import spec, vocabulary

TEXT = "The ferry left at noon with eleven goats, two of them stolen, and nobody on board who could swim. " * 2


def lost(keys: str, values: str) -> Loss:
    caches = {"main": CacheInfo(512, 1, keys, values)}
    return loss(spec(caches), spec({"main": CacheInfo(512, 1)}), vocabulary().encode_plain(TEXT))


def test_the_same_type_loses_nothing():
    same = lost("f16", "f16")
    assert same.rise == 0
    assert same.divergence == 0
    assert same.perplexity > 1


def test_coarser_types_lose_more():
    fine, coarse = lost("q8_0", "q8_0"), lost("q4_0", "q4_0")
    assert fine.divergence is not None
    assert coarse.divergence is not None
    assert 0 < fine.divergence < coarse.divergence
    assert fine.reference == coarse.reference


def test_an_unknown_type_is_refused():
    with pytest.raises(InvalidRequest, match="q3_k"):
        lost("q3_k", "f16")


def test_probabilities_add_up_to_one():
    odds = log_probabilities(np.asarray([1e4, 1e4 - 1, -1e4], np.float32))
    assert np.exp(odds).sum() == pytest.approx(1.0)
    assert odds[0] - odds[1] == pytest.approx(1.0)
