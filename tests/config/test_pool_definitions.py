"""The model definitions of the llm-pool guide, unchanged: each one loads, and a missing engine is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard import plugins
from modelyard.config.load import load_config
from modelyard.config.settings import LoadedConfig
from modelyard.router.settings import MODEL_KEYS, ModelSettings

GEMMA = "gemma-4-26b-a4b-it-ud-q5ks-llama-server"
DEFINITIONS: dict[str, dict[str, Any]] = {
    "some-ct2-model": {
        "backend": "ct2",
        "model_path": "/models/some-model-ct2",
        "prompt_format": "generic",
        "device": "cuda",
        "compute_type": "int8",
        "enabled": False,
    },
    "some-exl3-model": {
        "backend": "exllamav3",
        "model_path": "/models/some-model-exl3",
        "prompt_format": "generic",
        "exllama_cache_size": 8192,
        "exllama_cache_quant": None,
        "enabled": False,
    },
    "some-gguf-model": {
        "backend": "llama_cpp",
        "model_path": "/models/some-model.gguf",
        "prompt_format": "gemma4_template",
        "gguf_n_gpu_layers": -1,
        "gguf_n_ctx": 4096,
        "gguf_flash_attn": "auto",
        "enabled": False,
    },
    "qwen2.5-vl-3b": {
        "backend": "vllm",
        "model_path": None,
        "prompt_format": "generic",
        "modalities": ["text", "image"],
        "vllm_model": "Qwen/Qwen2.5-VL-3B-Instruct",
        "vllm_dtype": "bfloat16",
        "vllm_gpu_memory_utilization": 0.01,
        "vllm_kv_cache_memory_bytes": 1073741824,
        "vllm_max_model_len": 12288,
        "vllm_limit_mm_per_prompt": {"image": 1},
        "vllm_mm_processor_kwargs": {"max_pixels": 4014080},
        "enabled": False,
    },
    GEMMA: {
        "backend": "llama_server",
        "model_path": "/models/gemma-4-26B-A4B-it-UD-Q5_K_S.gguf",
        "prompt_format": "gemma4_template",
        "modalities": ["text", "image"],
        "enable_thinking": False,
        "llama_server_binary": "/opt/llama.cpp/bin/llama-server",
        "llama_server_library_path": ["/opt/llama.cpp/lib"],
        "llama_server_n_ctx": 4096,
        "llama_server_n_gpu_layers": "-1",
        "llama_server_flash_attn": "on",
        "llama_server_mmproj_path": "/models/mmproj-model-f16.gguf",
        "llama_server_image_max_tokens": 512,
        "llama_server_draft_model_path": "/models/gemma-4-26B-A4B-it-UD-Q5_K_S.gguf",
        "llama_server_spec_type": "draft",
        "llama_server_spec_draft_n_max": 5,
        "llama_server_spec_draft_p_min": 0.1,
        "llama_server_spec_draft_ngl": "-1",
        "llama_server_reasoning": "none",
        "replicas": 1,
        "replica_max": 1,
        "target_inflight": 1,
        "enabled": False,
    },
    "gemma4-nvfp4-vllm-serve": {
        "backend": "vllm_serve",
        "model_path": None,
        "prompt_format": "generic",
        "modalities": ["text", "image"],
        "vllm_model": "/models/nvidia/Gemma-4-26B-A4B-NVFP4",
        "vllm_dtype": "auto",
        "vllm_gpu_memory_utilization": 0.01,
        "vllm_kv_cache_memory_bytes": 2147483648,
        "vllm_max_model_len": 8192,
        "vllm_limit_mm_per_prompt": {"image": 1},
        "vllm_mm_processor_kwargs": {"max_pixels": 4014080},
        "vllm_speculative_method": "mtp",
        "vllm_speculative_model": "google/gemma-4-26B-A4B-it-assistant",
        "vllm_num_speculative_tokens": 8,
        "vllm_serve_binary": "/opt/vllm/bin/vllm",
        "vllm_serve_library_path": ["/opt/cuda/lib64"],
        "vllm_serve_env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        "vllm_serve_extra_args": ["--max-num-seqs", "1"],
        "enabled": False,
    },
    "qwen3.6-35b-a3b-nvfp4-vllm-serve": {
        "backend": "vllm_serve",
        "model_path": None,
        "prompt_format": "qwen3_template",
        "enable_thinking": False,
        "modalities": ["text", "image"],
        "vllm_model": "/models/nvidia/Qwen3.6-35B-A3B-NVFP4",
        "vllm_dtype": "auto",
        "vllm_gpu_memory_utilization": 0.01,
        "vllm_kv_cache_memory_bytes": 1073741824,
        "vllm_kv_cache_dtype": "fp8",
        "vllm_max_model_len": 8192,
        "vllm_trust_remote_code": True,
        "vllm_limit_mm_per_prompt": {"image": 1},
        "vllm_mm_processor_kwargs": {"max_pixels": 4014080},
        "vllm_speculative_method": "mtp",
        "vllm_speculative_moe_backend": "triton",
        "vllm_speculative_attention_backend": "triton_attn",
        "vllm_num_speculative_tokens": 1,
        "vllm_serve_binary": "/opt/vllm-qwen/bin/vllm",
        "vllm_serve_start_timeout_s": 900.0,
        "vllm_serve_library_path": [
            "/opt/vllm-qwen/lib/python3.12/site-packages/nvidia/cu13/lib",
            "/opt/vllm-qwen/lib/python3.12/site-packages/nvidia/cublas/lib",
        ],
        "vllm_serve_env": {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"},
        "vllm_serve_extra_args": [
            "--quantization",
            "modelopt",
            "--attention-backend",
            "triton_attn",
            "--moe-backend",
            "marlin",
            "--load-format",
            "fastsafetensors",
            "--max-num-seqs",
            "1",
            "--max-num-batched-tokens",
            "2048",
            "--reasoning-parser",
            "qwen3",
            "--default-chat-template-kwargs",
            '{"enable_thinking": false}',
            "--linear-backend",
            "cutlass",
        ],
        "enabled": False,
    },
    "frontier-large": {
        "backend": "openai_remote",
        "model_path": None,
        "remote_api_kind": "chat_completions",
        "remote_base_url": "https://api.example.com/v1",
        "remote_api_key_env": "EXAMPLE_API_KEY",
        "remote_model": "provider-model",
        "remote_timeout_s": 120,
        "remote_health_check": "config_only",
        "remote_max_retries": 0,
        "remote_thinking": "disabled",
        "target_inflight": 1,
        "enabled": False,
    },
}
COMMON = ("prompt_format", "modalities", "enable_thinking", "enabled", "replicas", "replica_max", "target_inflight")


@pytest.fixture(autouse=True)
def toy_build() -> None:
    """Use the real engines instead of the toy engine of this folder."""


def read(folder: Path, models: dict[str, Any], local: dict[str, Any] | None = None) -> LoadedConfig:
    (folder / "config").mkdir()
    (folder / "config" / "settings.json").write_text(json.dumps({"engine": {"models": models}}))
    if local is not None:
        (folder / "config" / "local.json").write_text(json.dumps({"engine": {"models": local}}))
    return load_config(env={"EXAMPLE_API_KEY": "secret"}, cwd=folder)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_definition_loads_and_reports_a_missing_engine(tmp_path: Path, name: str) -> None:
    written = DEFINITIONS[name]
    loaded = read(tmp_path, {name: written})
    model: ModelSettings = loaded.config.models[name]
    assert (model.backend, model.path) == (written["backend"], written["model_path"])
    assert {key: getattr(model, key) for key in COMMON if key in written} == {
        key: written[key] for key in COMMON if key in written
    }
    own = {key for key in written if key.startswith(written["backend"].partition("_")[0])}
    assert own <= model.options.keys() | MODEL_KEYS
    assert {problem.level for problem in loaded.problems} <= {"unavailable", "warning"}
    if written["backend"] not in plugins.names("engines"):
        (problem,) = loaded.problems
        assert problem.level == "unavailable"
        assert problem.path.startswith("engine.models.")
        assert problem.path.endswith(".backend")


def test_all_definitions_form_one_pool(tmp_path: Path) -> None:
    config = read(tmp_path, DEFINITIONS).config
    assert set(config.models) == set(DEFINITIONS)
    assert not any(model.enabled for model in config.models.values())
    assert set(config.router().catalog.models) == set(DEFINITIONS)


def test_a_local_file_can_enable_a_model(tmp_path: Path) -> None:
    config = read(tmp_path, {GEMMA: DEFINITIONS[GEMMA]}, {GEMMA: {"enabled": True}}).config
    assert config.models[GEMMA].enabled
    assert config.models[GEMMA].prompt_format == "gemma4_template"
