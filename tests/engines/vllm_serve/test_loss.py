"""The quality loss of a quantized KV cache with vllm serve: two servers read one text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard_optimize.trial import QUALITY_TEXT
from modelyard_vllm import serve as vllm_serve
from modelyard_vllm.loss import TOP_LOGPROBS
from modelyard_vllm.serve.loss import loss
from tests.engines.vllm.real_vllm import tokenizer
from tests.engines.vllm_serve import real_server
from tests.engines.vllm_serve.helpers import behaviour, options, recorded

IDS = [5, 9, 2, 7]


def spec(**chosen: Any) -> EngineSpec:
    return EngineSpec("echo", options(**chosen), {"main": CacheInfo(512, 2)})


def test_quantized_cache_is_compared_with_the_reference(tmp_path: Path) -> None:
    env = behaviour("", tmp_path / "notes")
    lost = loss(spec(vllm_kv_cache_dtype="fp8", vllm_serve_env=env), spec(vllm_serve_env=env), IDS)
    assert lost.reference == pytest.approx(2)
    assert lost.perplexity == pytest.approx(2.5)
    assert lost.divergence == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))
    requests = recorded(tmp_path / "notes", "text")
    assert [each["prompt"] for each in requests] == [IDS, IDS]
    assert {each["prompt_logprobs"] for each in requests} == {TOP_LOGPROBS}


def test_server_is_configured_for_one_text_and_does_not_sleep(tmp_path: Path) -> None:
    env = behaviour("", tmp_path / "notes")
    loss(spec(vllm_serve_env=env, vllm_serve_sleep_s=60.0), spec(vllm_serve_env=env), IDS)
    first, _ = recorded(tmp_path / "notes", "argv")
    assert first[first.index("--max-logprobs") + 1] == str(TOP_LOGPROBS)
    assert "--no-enable-prefix-caching" in first
    assert "--enable-sleep-mode" not in first


def test_server_that_does_not_start_is_reported_with_its_reason() -> None:
    with pytest.raises(Unavailable, match="this machine has no such instruction"):
        loss(spec(vllm_serve_env=behaviour("fails_to_start")), spec(), IDS)


def test_refused_text_is_reported_with_its_reason() -> None:
    with pytest.raises(InvalidRequest, match="it answered 400, no log probabilities today"):
        loss(spec(vllm_serve_env=behaviour("cannot_read")), spec(), IDS)


@pytest.mark.vllm
def test_real_server_reads_the_built_in_text_with_both_cache_types() -> None:
    def served(**chosen: Any) -> EngineSpec:
        return EngineSpec("smollm2", vllm_serve.Options(**real_server.fields(**chosen)), {"main": CacheInfo(2048, 8)})

    lost = loss(served(vllm_kv_cache_dtype="fp8"), served(), tokenizer().encode_plain(QUALITY_TEXT))
    assert 5 < lost.reference < 50
    assert abs(lost.rise) < 0.2
    assert lost.divergence is not None
    assert 0 < lost.divergence < 0.2
