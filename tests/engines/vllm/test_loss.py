"""The quality loss of a quantized KV cache with vLLM: two processes evaluate one text."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard_optimize.trial import QUALITY_TEXT
from modelyard_vllm.loss import TOP_LOGPROBS, compare, divergence, evaluation_spec, loss
from modelyard_vllm.options import engine_arguments
from tests.engines.vllm import real_vllm
from tests.engines.vllm.helpers import FAKE_LIBRARY, spec

IDS = [5, 9, 2, 7]


@pytest.fixture
def fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FAKE_LIBRARY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("fake_library")
def test_loss_compares_with_the_reference() -> None:
    measured = loss(spec(vllm_kv_cache_dtype="fp8"), spec(), IDS)
    assert measured.reference == pytest.approx(4)
    assert measured.perplexity == pytest.approx(1 / 0.23)
    expected = 0.25 * math.log(0.25 / 0.23) + 0.125 * math.log(0.125 / 0.145)
    assert measured.divergence == pytest.approx(expected)


@pytest.mark.usefixtures("fake_library")
def test_refused_number_format_is_reported_with_vllms_message() -> None:
    with pytest.raises(InvalidRequest, match="could not read the text: ValueError: fp9 is not a supported"):
        loss(spec(vllm_kv_cache_dtype="fp9"), spec(), IDS)


def test_missing_interpreter_is_reported() -> None:
    absent = EngineSpec("m", spec().options, spec().caches, python="/nowhere/python")
    with pytest.raises(InvalidRequest, match=r"could not read the text: .*nowhere"):
        loss(absent, absent, IDS)


def test_evaluation_is_set_up_for_one_text_only(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "vllm_kv_cache_dtype": "fp8",
        "vllm_speculative_method": "ngram",
        "vllm_num_speculative_tokens": 4,
        "lora": {"a": str(tmp_path)},
        "vllm_max_num_seqs": 64,
    }
    evaluation = evaluation_spec(spec({"main": CacheInfo(32_768, 8)}, **options), 700)
    arguments = engine_arguments(evaluation.options, evaluation.caches)
    assert arguments["kv_cache_dtype"] == "fp8"
    assert arguments["block_size"] == 16
    assert (arguments["max_model_len"], arguments["max_num_seqs"]) == (708, 1)
    assert arguments["max_logprobs"] == TOP_LOGPROBS
    assert not arguments["enable_prefix_caching"]
    assert arguments.keys().isdisjoint({"speculative_config", "enable_lora"})


def test_most_of_the_text_is_read_from_the_cache() -> None:
    """Kernels may use exact numbers for the tokens of the same step, so the steps must be short."""
    evaluation = evaluation_spec(spec(), 700)
    arguments = engine_arguments(evaluation.options, evaluation.caches)
    assert arguments["enable_chunked_prefill"]
    assert arguments["max_num_batched_tokens"] < 700 / 4


def row(*probabilities: float) -> dict[int, float]:
    return {token: math.log(probability) for token, probability in enumerate(probabilities)}


@pytest.mark.parametrize(
    ("mine", "reference", "expected"),
    [
        (row(0.5, 0.25), row(0.5, 0.25), 0.0),
        (row(0.25, 0.25), row(0.5, 0.25), 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)),
        (row(0.5, 0.5), row(0.5, 0.5), 0.0),
        (row(0.5), row(0.5, 0.25), 0.0),
    ],
    ids=["the same", "less sure", "no remainder", "a token in one row only counts as another"],
)
def test_divergence_counts_all_other_tokens_as_one(
    mine: dict[int, float], reference: dict[int, float], expected: float
) -> None:
    assert divergence(mine, reference) == pytest.approx(expected)


def test_divergence_stays_finite_without_a_remainder() -> None:
    assert math.isfinite(divergence(row(0.5, 0.5), row(0.5, 0.25)))


def test_result_of_another_length_than_the_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 and 2 tokens of 2"):
        compare([row(0.5)], [row(0.5), row(0.5)], [0, 0, 0])


@pytest.mark.vllm
def test_real_vllm_evaluates_the_built_in_text_in_both_number_formats() -> None:
    ids = real_vllm.tokenizer().encode_plain(QUALITY_TEXT)
    measured = loss(real_vllm.spec(vllm_kv_cache_dtype="fp8"), real_vllm.spec(), ids)
    assert 5 < measured.reference < 50
    assert abs(measured.rise) < 0.2
    assert measured.divergence is not None
    assert 0 < measured.divergence < 0.2
