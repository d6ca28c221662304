"""The exact engine arguments of a definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelyard.config.engine_options import engine_spec
from modelyard.config.load import load_config
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.engines.vllm.options import VllmOptions, engine_arguments
from tests.config.test_pool_definitions import DEFINITIONS

ONE = {"m": CacheInfo(4096)}


def defined(folder: Path, name: str) -> EngineSpec:
    """The spec that a definition of the llm-pool guide comes to."""
    (folder / "pool.json").write_text(json.dumps({"engine": {"models": {name: DEFINITIONS[name]}}}))
    config = load_config(folder / "pool.json", env={}).config
    return engine_spec(config.router().catalog.models[name], config.models[name])


def told(**fields: Any) -> dict[str, Any]:
    """What the fields add to the arguments of a bare definition."""
    bare = engine_arguments(VllmOptions(vllm_model="m"), ONE)
    got = engine_arguments(VllmOptions(vllm_model="m", **fields), ONE)
    return {name: value for name, value in got.items() if bare.get(name) != value}


def test_the_whole_definition_of_a_pool_becomes_these_arguments(tmp_path: Path) -> None:
    spec = defined(tmp_path, "qwen2.5-vl-3b")
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


def test_a_bare_definition_leaves_everything_else_to_vllm() -> None:
    assert engine_arguments(VllmOptions(path="/models/m"), ONE) == {
        "model": "/models/m",
        "max_model_len": 4096,
        "max_num_seqs": 1,
        "dtype": "auto",
    }


def test_all_caches_are_one_of_the_widest_window_and_all_their_places() -> None:
    caches = {"main": CacheInfo(8192, 3), "fast": CacheInfo(2048, 2)}
    got = engine_arguments(VllmOptions(vllm_model="m"), caches, "/found/m")
    assert (got["model"], got["max_model_len"], got["max_num_seqs"]) == ("/found/m", 8192, 5)
    assert engine_arguments(VllmOptions(vllm_model="m", vllm_max_num_seqs=9), caches)["max_num_seqs"] == 9


def test_each_field_has_its_argument() -> None:
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
    assert told(**{f"vllm_{name}": value for name, value in plain.items()}) == plain


def test_the_pixels_of_one_load_go_before_the_definitions() -> None:
    kwargs = {"max_pixels": 1, "min_pixels": 2}
    assert told(vllm_mm_processor_kwargs=kwargs, vllm_max_pixels=99) == {
        "mm_processor_kwargs": {"max_pixels": 99, "min_pixels": 2}
    }


def test_ways_to_speculate_are_kept_apart() -> None:
    def config(**fields: Any) -> Any:
        return told(**fields).get("speculative_config")

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


def test_adapters_switch_lora_on() -> None:
    assert told(lora={"law": "/l", "med": "/m"}, vllm_max_lora_rank=32) == {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 32,
    }


def test_further_arguments_pass_by_their_own_names() -> None:
    assert told(vllm_engine_args={"block_size": 32}) == {"block_size": 32}
