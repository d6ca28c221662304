"""What a KV cache of coarser numbers costs with vLLM: two of them read one text, each in a process of its own."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.engines.vllm.loss import TOP_LOGPROBS, compare, divergence, evaluation_spec, loss
from modelyard.engines.vllm.options import engine_arguments
from modelyard.tune.trial_process import QUALITY_TEXT
from tests.engines.vllm import real_vllm
from tests.engines.vllm.helpers import spec

STANDIN = Path(__file__).parent / "standin"
IDS = [5, 9, 2, 7]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{STANDIN}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("standin")
def test_coarser_numbers_are_held_against_the_references() -> None:
    lost = loss(spec(vllm_kv_cache_dtype="fp8"), spec(), IDS)
    assert lost.reference == pytest.approx(4)
    assert lost.perplexity == pytest.approx(1 / 0.23)
    moved = 0.25 * math.log(0.25 / 0.23) + 0.125 * math.log(0.125 / 0.145)
    assert lost.divergence == pytest.approx(moved)


@pytest.mark.usefixtures("standin")
def test_numbers_that_vllm_refuses_are_a_refusal_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="could not read the text: ValueError: fp9 is no number format"):
        loss(spec(vllm_kv_cache_dtype="fp9"), spec(), IDS)


def test_an_interpreter_that_is_not_there_is_said() -> None:
    absent = EngineSpec("m", spec().options, spec().caches, python="/nowhere/python")
    with pytest.raises(InvalidRequest, match=r"could not read the text: .*nowhere"):
        loss(absent, absent, IDS)


def test_the_reader_is_made_for_one_text_and_nothing_beside_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "vllm_kv_cache_dtype": "fp8",
        "vllm_speculative_method": "ngram",
        "vllm_num_speculative_tokens": 4,
        "lora": {"a": str(tmp_path)},
        "vllm_max_num_seqs": 64,
    }
    told = evaluation_spec(spec({"main": CacheInfo(32_768, 8)}, **options), 700)
    arguments = engine_arguments(told.options, told.caches)
    assert arguments["kv_cache_dtype"] == "fp8"
    assert arguments["block_size"] == 16
    assert (arguments["max_model_len"], arguments["max_num_seqs"]) == (708, 1)
    assert arguments["max_logprobs"] == TOP_LOGPROBS
    assert not arguments["enable_prefix_caching"]
    assert arguments.keys().isdisjoint({"speculative_config", "enable_lora"})


def test_most_of_the_text_is_read_out_of_the_cache() -> None:
    """Kernels may use exact numbers for what they read in the same step: the steps must be short."""
    told = evaluation_spec(spec(), 700)
    arguments = engine_arguments(told.options, told.caches)
    assert arguments["enable_chunked_prefill"]
    assert arguments["max_num_batched_tokens"] < 700 / 4


def row(*odds: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(odds)}


@pytest.mark.parametrize(
    ("mine", "reference", "apart"),
    [
        (row(0.5, 0.25), row(0.5, 0.25), 0.0),
        (row(0.25, 0.25), row(0.5, 0.25), 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)),
        (row(0.5, 0.5), row(0.5, 0.5), 0.0),
        (row(0.5), row(0.5, 0.25), 0.0),
    ],
    ids=["the same", "less sure", "nothing left over", "a token that only one has told is one of the others"],
)
def test_divergence_takes_all_that_was_not_told_as_one(
    mine: dict[int, float], reference: dict[int, float], apart: float
) -> None:
    assert divergence(mine, reference) == pytest.approx(apart)


def test_divergence_stays_finite_where_the_others_have_no_odds_at_all() -> None:
    assert math.isfinite(divergence(row(0.5, 0.5), row(0.5, 0.25)))


def test_an_answer_of_another_length_than_the_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 and 2 tokens of 2"):
        compare([row(0.5)], [row(0.5), row(0.5)], [0, 0, 0])


@pytest.mark.vllm
def test_a_real_vllm_reads_the_built_in_text_in_both_number_formats() -> None:
    ids = real_vllm.vocabulary().encode_plain(QUALITY_TEXT)
    lost = loss(real_vllm.spec(vllm_kv_cache_dtype="fp8"), real_vllm.spec(), ids)
    assert 5 < lost.reference < 50
    assert abs(lost.rise) < 0.2
    assert lost.divergence is not None
    assert 0 < lost.divergence < 0.2
