"""What a definition for vLLM may say, and what one load may set for itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from modelyard.engines.vllm.options import LIVE_OVERRIDES, VllmOptions


def test_nine_fields_may_be_set_for_one_load() -> None:
    assert list(LIVE_OVERRIDES) == [
        "vllm_max_model_len",
        "vllm_kv_cache_dtype",
        "vllm_kv_cache_memory_bytes",
        "vllm_max_pixels",
        "vllm_speculative_method",
        "vllm_speculative_model",
        "vllm_speculative_moe_backend",
        "vllm_speculative_attention_backend",
        "vllm_num_speculative_tokens",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vllm_max_model_len", 8192),
        ("vllm_kv_cache_dtype", "fp8"),
        ("vllm_kv_cache_memory_bytes", 1 << 30),
        ("vllm_max_pixels", 4014080),
        ("vllm_speculative_method", "mtp"),
        ("vllm_speculative_method", "off"),
        ("vllm_speculative_model", "google/gemma-4-26B-A4B-it-assistant"),
        ("vllm_speculative_model", "/models/draft"),
        ("vllm_speculative_moe_backend", "triton"),
        ("vllm_speculative_attention_backend", "triton_attn"),
        ("vllm_num_speculative_tokens", 8),
    ],
)
def test_values_within_their_range_are_taken(field: str, value: Any) -> None:
    assert TypeAdapter(LIVE_OVERRIDES[field]).validate_python(value) == value


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("vllm_max_model_len", 0, "greater than or equal to 1"),
        ("vllm_kv_cache_dtype", "fp8 --api-key x", "pattern"),
        ("vllm_kv_cache_memory_bytes", 1000, "greater than or equal to 1048576"),
        ("vllm_max_pixels", -1, "greater than or equal to 1"),
        ("vllm_speculative_method", "magic", "draft_model"),
        ("vllm_speculative_model", "--trust-remote-code", "pattern"),
        ("vllm_num_speculative_tokens", 0, "greater than or equal to 1"),
    ],
)
def test_values_outside_are_refused_with_the_range(field: str, value: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TypeAdapter(LIVE_OVERRIDES[field]).validate_python(value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "vllm_model is needed"),
        ({"vllm_model": "m", "vllm_dtype": "int3"}, "bfloat16"),
        ({"vllm_model": "m", "vllm_gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"vllm_model": "m", "vllm_nonsense": 1}, "Extra inputs"),
        ({"vllm_model": "m", "vllm_engine_args": {"max_model_len": 1}}, "max_model_len is set by vllm_max_model_len"),
        ({"vllm_model": "m", "vllm_engine_args": {"dtype": "half"}}, "dtype is set by vllm_dtype"),
    ],
)
def test_nonsense_is_refused_with_the_field_at_fault(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        VllmOptions(**fields)


def speculating(method: str | None, **fields: Any) -> VllmOptions:
    chosen = {f"vllm_speculative_{name}": value for name, value in fields.items() if name != "n"}
    return VllmOptions(
        vllm_model="m", vllm_speculative_method=method, vllm_num_speculative_tokens=fields.get("n"), **chosen
    )


@pytest.mark.parametrize(
    ("method", "fields", "told"),
    [
        (None, {"model": "d"}, "vllm_speculative_model needs vllm_speculative_method"),
        (None, {"n": 3}, "vllm_num_speculative_tokens needs vllm_speculative_method"),
        ("draft_model", {"n": 3}, "draft_model needs vllm_speculative_model"),
        ("draft_model", {"model": "d"}, "draft_model needs vllm_num_speculative_tokens"),
        ("mlp_speculator", {"n": 3}, "mlp_speculator needs vllm_speculative_model"),
        ("ngram", {"n": 3, "model": "d"}, "ngram guesses without a model: leave vllm_speculative_model out"),
        ("suffix", {"moe_backend": "triton"}, "leave vllm_speculative_moe_backend out"),
    ],
)
def test_ways_to_speculate_are_not_mixed(method: str | None, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        speculating(method, **fields)


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("mtp", {}),
        ("mtp", {"model": "assistant", "n": 8}),
        ("mtp", {"moe_backend": "triton", "attention_backend": "triton_attn", "n": 1}),
        ("draft_model", {"model": "d", "n": 3}),
        ("mlp_speculator", {"model": "d"}),
        ("ngram", {"n": 3}),
        ("off", {"model": "d", "n": 3}),
    ],
)
def test_each_way_stands_by_itself(method: str, fields: dict[str, Any]) -> None:
    assert speculating(method, **fields).speculates is (method != "off")
