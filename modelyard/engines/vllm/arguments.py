"""A model's fields as vLLM's own engine arguments, by the names that `EngineArgs` and the command line share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelyard.core.engine import CacheInfo
from modelyard.engines.vllm.settings import VllmSettings

# fields that are vLLM's arguments with `vllm_` before them, in the order in which they are told
_PLAIN = (
    "dtype",
    "quantization",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "seed",
    "revision",
)


def engine_arguments(
    settings: VllmSettings, caches: Mapping[str, CacheInfo], model: str | None = None
) -> dict[str, Any]:
    """Only what is set: the rest is vLLM's own default. `model` is where the model was found; unset: as written."""
    told = dict(_arguments(settings, caches, model or settings.model_name))
    return {name: value for name, value in told.items() if value is not None} | settings.vllm_engine_args


def window(caches: Mapping[str, CacheInfo]) -> int:
    """All caches of a model are one KV cache in vLLM: every request may have the widest window of them."""
    return max(cache.window for cache in caches.values())


def places(settings: VllmSettings, caches: Mapping[str, CacheInfo]) -> int:
    return settings.vllm_max_num_seqs or sum(cache.parallel for cache in caches.values())


def _arguments(settings: VllmSettings, caches: Mapping[str, CacheInfo], model: str) -> Iterator[tuple[str, Any]]:
    yield "model", model
    yield "tokenizer", settings.vllm_tokenizer
    yield "max_model_len", window(caches)
    yield "max_num_seqs", places(settings, caches)
    for name in _PLAIN:
        yield name, getattr(settings, f"vllm_{name}")
    yield "trust_remote_code", settings.vllm_trust_remote_code or None
    yield "enforce_eager", settings.vllm_enforce_eager or None
    yield "limit_mm_per_prompt", settings.vllm_limit_mm_per_prompt or None
    yield "mm_processor_kwargs", _processor(settings) or None
    yield "speculative_config", speculation(settings)
    yield from _lora(settings)


def _processor(settings: VllmSettings) -> dict[str, Any]:
    pixels = settings.vllm_max_pixels
    return settings.vllm_mm_processor_kwargs | ({} if pixels is None else {"max_pixels": pixels})


def speculation(settings: VllmSettings) -> dict[str, Any] | None:
    """The `speculative_config`. With mtp, `model` is the assistant that belongs to the model, never a draft model of
    its own: the method is always told, so that vLLM does not guess one from the checkpoint."""
    if not settings.speculates:
        return None
    told = {
        "method": settings.vllm_speculative_method,
        "model": settings.vllm_speculative_model,
        "num_speculative_tokens": settings.vllm_num_speculative_tokens,
        "moe_backend": settings.vllm_speculative_moe_backend,
        "attention_backend": settings.vllm_speculative_attention_backend,
    }
    return {name: value for name, value in told.items() if value is not None}


def _lora(settings: VllmSettings) -> Iterator[tuple[str, Any]]:
    if settings.lora:
        yield "enable_lora", True
        yield "max_loras", settings.vllm_max_loras or min(len(settings.lora), 8)
        yield "max_lora_rank", settings.vllm_max_lora_rank
