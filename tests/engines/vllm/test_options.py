"""vLLM's options: accepted values, live overrides, and the exact engine arguments that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from modelyard.config.load import load_config
from modelyard.config.settings import engine_spec
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard_vllm.options import LIVE_OVERRIDES, VllmOptions, engine_arguments
from tests.config.test_pool_definitions import DEFINITIONS


def test_live_overrides_are_these_fields() -> None:
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
def test_live_overrides_accept_values_within_their_range(field: str, value: Any) -> None:
    assert TypeAdapter(LIVE_OVERRIDES[field]).validate_python(value) == value


@pytest.mark.parametrize(
    ("field", "value", "message"),
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
def test_live_overrides_refuse_values_outside_their_range(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(LIVE_OVERRIDES[field]).validate_python(value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "vllm_model is needed"),
        ({"vllm_model": "m", "vllm_dtype": "int3"}, "bfloat16"),
        ({"vllm_model": "m", "vllm_gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"vllm_model": "m", "vllm_nonsense": 1}, "Extra inputs"),
        ({"vllm_model": "m", "vllm_engine_args": {"max_model_len": 1}}, "max_model_len is set by vllm_max_model_len"),
        ({"vllm_model": "m", "vllm_engine_args": {"dtype": "half"}}, "dtype is set by vllm_dtype"),
    ],
)
def test_wrong_options_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmOptions(**fields)


def speculating(method: str | None, **fields: Any) -> VllmOptions:
    values = {f"vllm_speculative_{name}": value for name, value in fields.items() if name != "n"}
    return VllmOptions(
        vllm_model="m", vllm_speculative_method=method, vllm_num_speculative_tokens=fields.get("n"), **values
    )


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (None, {"model": "d"}, "vllm_speculative_model needs vllm_speculative_method"),
        (None, {"n": 3}, "vllm_num_speculative_tokens needs vllm_speculative_method"),
        ("draft_model", {"n": 3}, "draft_model needs vllm_speculative_model"),
        ("draft_model", {"model": "d"}, "draft_model needs vllm_num_speculative_tokens"),
        ("mlp_speculator", {"n": 3}, "mlp_speculator needs vllm_speculative_model"),
        ("ngram", {"n": 3, "model": "d"}, "ngram uses no model: remove vllm_speculative_model"),
        ("suffix", {"moe_backend": "triton"}, "remove vllm_speculative_moe_backend"),
    ],
)
def test_speculation_fields_that_do_not_match_are_refused(
    method: str | None, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
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
def test_each_speculative_method_is_accepted_with_its_fields(method: str, fields: dict[str, Any]) -> None:
    assert speculating(method, **fields).speculates is (method != "off")


# --- engine arguments -----------------------------------------------------------------------------------------------

ONE = {"m": CacheInfo(4096)}


def pool_spec(folder: Path, name: str) -> EngineSpec:
    """The spec of a definition in the llm-pool guide."""
    (folder / "pool.json").write_text(json.dumps({"engine": {"models": {name: DEFINITIONS[name]}}}))
    config = load_config(folder / "pool.json", env={}).config
    return engine_spec(config.router().catalog.models[name])


def added_arguments(**fields: Any) -> dict[str, Any]:
    """What the options add to the arguments of a minimal definition."""
    minimal = engine_arguments(VllmOptions(vllm_model="m"), ONE)
    arguments = engine_arguments(VllmOptions(vllm_model="m", **fields), ONE)
    return {name: value for name, value in arguments.items() if minimal.get(name) != value}


def test_definition_from_the_pool_guide_becomes_these_arguments(tmp_path: Path) -> None:
    spec = pool_spec(tmp_path, "qwen2.5-vl-3b")
    assert engine_arguments(spec.options, spec.caches) == {
        "model": "Qwen/Qwen2.5-VL-3B-Instruct",
        "max_model_len": 12288,
        "max_num_seqs": 1,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": 1073741824,
        "limit_mm_per_prompt": {"image": 1},
        "mm_processor_kwargs": {"max_pixels": 4014080},
    }
    assert spec.modalities == ("text", "image")


def test_minimal_definition_leaves_everything_else_to_vllm() -> None:
    assert engine_arguments(VllmOptions(path="/models/m"), ONE) == {
        "model": "/models/m",
        "max_model_len": 4096,
        "max_num_seqs": 1,
        "dtype": "auto",
    }


def test_all_caches_become_one_with_the_widest_window_and_all_sequences() -> None:
    caches = {"main": CacheInfo(8192, 3), "fast": CacheInfo(2048, 2)}
    arguments = engine_arguments(VllmOptions(vllm_model="m"), caches, "/found/m")
    assert (arguments["model"], arguments["max_model_len"], arguments["max_num_seqs"]) == ("/found/m", 8192, 5)
    assert engine_arguments(VllmOptions(vllm_model="m", vllm_max_num_seqs=9), caches)["max_num_seqs"] == 9


def test_each_option_becomes_its_argument() -> None:
    plain = {
        "tokenizer": "t",
        "revision": "main",
        "trust_remote_code": True,
        "quantization": "modelopt",
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "seed": 7,
    }
    assert added_arguments(**{f"vllm_{name}": value for name, value in plain.items()}) == plain


def test_vllm_max_pixels_overrides_the_processors_max_pixels() -> None:
    kwargs = {"max_pixels": 1, "min_pixels": 2}
    assert added_arguments(vllm_mm_processor_kwargs=kwargs, vllm_max_pixels=99) == {
        "mm_processor_kwargs": {"max_pixels": 99, "min_pixels": 2}
    }


def test_speculative_config_follows_the_method() -> None:
    def config(**fields: Any) -> Any:
        return added_arguments(**fields).get("speculative_config")

    assert config(vllm_speculative_method="draft_model", vllm_speculative_model="d", vllm_num_speculative_tokens=3) == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
    }
    assert config(vllm_speculative_method="mlp_speculator", vllm_speculative_model="d") == {
        "method": "mlp_speculator",
        "model": "d",
    }
    assert config(vllm_speculative_method="mtp") == {"method": "mtp"}
    assert config(vllm_speculative_method="off", vllm_speculative_model="d") is None


def test_adapters_enable_lora() -> None:
    assert added_arguments(lora={"law": "/l", "med": "/m"}, vllm_max_lora_rank=32) == {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 32,
    }


def test_vllm_engine_args_are_passed_on() -> None:
    assert added_arguments(vllm_engine_args={"block_size": 32}) == {"block_size": 32}
