"""What vLLM will take of memory, worked out from a model's folder before anything is loaded.

weights   the files, as large as the number format that is computed in makes them; the checkpoint that guesses, too
KV        what vllm_kv_cache_memory_bytes says; else what the windows of all conversations need at once
share     on a GPU, without those bytes, vLLM fills up its share of the memory with KV cache, needed or not
compute   a rule of thumb: the largest layer's activations of one step, and what the libraries themselves take
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.engines.vllm import model_folder
from modelyard.engines.vllm.options import VllmOptions, max_model_len, max_num_seqs

_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_STEP = 2048  # tokens of one step, where nobody says
_ROWS = 256  # of scores that vLLM makes room for
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SHARE = 0.9  # of a GPU, where nobody says
_RUNTIME = {"cpu": 9 << 28, "gpu": 1 << 29}  # torch in three processes: measured on a CPU; on a GPU its context


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    settings: VllmOptions = spec.options
    found = model_folder.require_folder(settings.model_name)
    shape, device = model_folder.read_folder_config(found), "gpu" if machine.gpus else "cpu"
    weights = _weights(found, settings, shape) + _guesser(settings)
    compute = _compute(settings, shape) + _RUNTIME[device]
    needed = _kv(settings, spec.caches, shape)
    return MemoryEstimate(weights, max(needed, _share(settings, machine) - weights - compute), compute, device)


def _share(settings: VllmOptions, machine: AvailableMemory) -> int:
    """What is taken of a GPU in any case."""
    if settings.vllm_kv_cache_memory_bytes is not None or not machine.gpus:
        return 0
    return int(max(machine.gpus.values()) * (settings.vllm_gpu_memory_utilization or _SHARE))


def _weights(found: Path, settings: VllmOptions, shape: Mapping[str, Any]) -> int:
    held = _size(found)
    stored, wanted = _BYTES.get(_stored(shape)), _BYTES.get(settings.vllm_dtype)
    if stored is None or wanted is None or shape.get("quantization_config") or settings.vllm_quantization:
        return held
    return held * wanted // stored


def _size(found: Path) -> int:
    """Of one format only: some folders hold the same weights in several."""
    for pattern in _WEIGHTS:
        if total := sum(file.stat().st_size for file in found.glob(pattern)):
            return total
    return 0


def _guesser(settings: VllmOptions) -> int:
    if not settings.speculates or settings.vllm_speculative_model is None:
        return 0
    found = model_folder.find_folder(settings.vllm_speculative_model)
    return _size(found) if found is not None else 0


def _kv(settings: VllmOptions, caches: Mapping[str, CacheInfo], shape: Mapping[str, Any]) -> int:
    if settings.vllm_kv_cache_memory_bytes is not None:
        return settings.vllm_kv_cache_memory_bytes
    heads = int(shape.get("num_key_value_heads") or shape.get("num_attention_heads") or 0)
    token = 2 * int(shape.get("num_hidden_layers") or 0) * heads * _head_width(shape) * _kv_bytes(settings, shape)
    return token * max_model_len(caches) * max_num_seqs(settings, caches)


def _head_width(shape: Mapping[str, Any]) -> int:
    told = shape.get("head_dim") or int(shape.get("hidden_size") or 0) // int(shape.get("num_attention_heads") or 1)
    return int(told)


def _kv_bytes(settings: VllmOptions, shape: Mapping[str, Any]) -> int:
    named = settings.vllm_kv_cache_dtype or "auto"
    if named.startswith(("fp8", "int8")):
        return 1
    return _BYTES.get(named) or _number(settings, shape)


def _number(settings: VllmOptions, shape: Mapping[str, Any]) -> int:
    return _BYTES.get(settings.vllm_dtype) or min(2, _BYTES.get(_stored(shape), 2))


def _stored(shape: Mapping[str, Any]) -> str:
    return str(shape.get("dtype") or shape.get("torch_dtype") or "")


def _compute(settings: VllmOptions, shape: Mapping[str, Any]) -> int:
    tokens = settings.vllm_max_num_batched_tokens or _STEP
    widest = max(int(shape.get("intermediate_size") or 0), int(shape.get("hidden_size") or 0))
    logits = _ROWS * 4 * int(shape.get("vocab_size") or 0)
    return 2 * tokens * widest * _number(settings, shape) + logits
