"""What vLLM will take, from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.core.errors import NotFound
from modelyard.engines.vllm import estimate
from modelyard.engines.vllm.options import VllmOptions

CACHES = {"main": CacheInfo(1000, 2), "fast": CacheInfo(500, 1)}
HERE = AvailableMemory(1 << 40)
GPU = AvailableMemory(1 << 40, {"GPU-1": 100 << 30})
SHAPE = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 100,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def of(model: Path, machine: AvailableMemory = HERE, **options: Any) -> MemoryEstimate:
    return estimate(EngineSpec("m", VllmOptions(vllm_model=str(model), **options), CACHES), machine)


def test_weights_are_the_files_in_the_format_that_is_computed_in(model: Path) -> None:
    assert of(model).weights == of(model, vllm_dtype="bfloat16").weights == 1000
    assert of(model, vllm_dtype="float32").weights == 2000
    assert of(model, vllm_dtype="float32", vllm_quantization="modelopt").weights == 1000
    (model / "pytorch_model.bin").write_bytes(bytes(7777))
    assert of(model).weights == 1000, "the same weights once more"


def test_kv_is_what_the_windows_need_unless_it_is_named(model: Path) -> None:
    token = 2 * 3 * 2 * 16 * 2
    assert of(model).kv == token * 1000 * 3
    assert of(model, vllm_dtype="float32").kv == 2 * token * 1000 * 3
    assert of(model, vllm_kv_cache_dtype="fp8").kv == token // 2 * 1000 * 3
    assert of(model, vllm_kv_cache_memory_bytes=1 << 30).kv == of(model, GPU, vllm_kv_cache_memory_bytes=1 << 30).kv
    assert of(model, vllm_kv_cache_memory_bytes=1 << 30).kv == 1 << 30


def test_a_gpu_is_filled_up_where_nobody_says_how_much(model: Path) -> None:
    assert of(model, GPU).total == int((100 << 30) * 0.9)
    assert of(model, GPU, vllm_gpu_memory_utilization=0.5).total == 50 << 30
    assert of(model, GPU, vllm_gpu_memory_utilization=0.001).kv == of(model).kv
    assert (of(model).device, of(model, GPU).device) == ("cpu", "gpu")


def test_a_checkpoint_that_guesses_counts_while_it_guesses(model: Path) -> None:
    chosen = {"vllm_speculative_model": str(model), "vllm_num_speculative_tokens": 1}
    assert of(model, vllm_speculative_method="mtp", **chosen).weights == 2000
    assert of(model, vllm_speculative_method="off", **chosen).weights == 1000


def test_a_model_that_is_not_here_cannot_be_judged() -> None:
    with pytest.raises(NotFound):
        of(Path("org/none"))
