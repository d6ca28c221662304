"""The memory that vLLM takes, estimated from a model's folder before it is loaded.

weights   the files in the number format of the computation, and the draft checkpoint
KV        vllm_kv_cache_memory_bytes; else the windows of all conversations
share     on a GPU, without that option, vLLM fills its share of the memory with KV cache, needed or not
compute   a rule of thumb: the largest layer's activations of one step, and the libraries' own memory
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.engines.vllm.model_folder import find_folder, read_config, require_folder
from modelyard.engines.vllm.options import VllmOptions, max_model_len, max_num_seqs

_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# vLLM's defaults
_BATCHED_TOKENS = 2048
_LOGITS_ROWS = 256
_GPU_SHARE = 0.9
# On a CPU measured: torch in three processes. On a GPU the CUDA context.
_RUNTIME = {"cpu": 9 << 28, "gpu": 1 << 29}

Config = Mapping[str, Any]


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    options: VllmOptions = spec.options
    folder = require_folder(options.model_name)
    config, device = read_config(folder), "gpu" if machine.gpus else "cpu"
    weights = _weights(folder, options, config)
    compute = _compute(options, config) + _RUNTIME[device]
    kv = _kv(options, spec.caches, config)
    if options.vllm_kv_cache_memory_bytes is None and machine.gpus:
        share = int(max(machine.gpus.values()) * (options.vllm_gpu_memory_utilization or _GPU_SHARE))
        kv = max(kv, share - weights - compute)
    return MemoryEstimate(weights, kv, compute, device)


def _weights(folder: Path, options: VllmOptions, config: Config) -> int:
    size = _file_size(folder)
    stored, computed = _BYTES.get(_stored_dtype(config)), _BYTES.get(options.vllm_dtype)
    if stored and computed and not (config.get("quantization_config") or options.vllm_quantization):
        size = size * computed // stored
    if options.speculates and options.vllm_speculative_model is not None:
        draft = find_folder(options.vllm_speculative_model)
        size += _file_size(draft) if draft is not None else 0
    return size


def _file_size(folder: Path) -> int:
    """Of one format only: some folders hold the same weights in several."""
    for pattern in _WEIGHT_FILES:
        if total := sum(file.stat().st_size for file in folder.glob(pattern)):
            return total
    return 0


def _kv(options: VllmOptions, caches: Mapping[str, CacheInfo], config: Config) -> int:
    if options.vllm_kv_cache_memory_bytes is not None:
        return options.vllm_kv_cache_memory_bytes
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // (heads or 1))
    dtype = options.vllm_kv_cache_dtype or "auto"
    size = 1 if dtype.startswith(("fp8", "int8")) else _BYTES.get(dtype) or _activation_bytes(options, config)
    token = 2 * int(config.get("num_hidden_layers") or 0) * kv_heads * head_dim * size
    return token * max_model_len(caches) * max_num_seqs(options, caches)


def _compute(options: VllmOptions, config: Config) -> int:
    tokens = options.vllm_max_num_batched_tokens or _BATCHED_TOKENS
    width = max(int(config.get("intermediate_size") or 0), int(config.get("hidden_size") or 0))
    logits = _LOGITS_ROWS * 4 * int(config.get("vocab_size") or 0)
    return 2 * tokens * width * _activation_bytes(options, config) + logits


def _activation_bytes(options: VllmOptions, config: Config) -> int:
    return _BYTES.get(options.vllm_dtype) or min(2, _BYTES.get(_stored_dtype(config), 2))


def _stored_dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")
