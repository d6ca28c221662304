"""The vLLM options that `modelyard optimize` may change, for vLLM in process and as a server.

The share of GPU memory is not among them: it decides what else fits beside the model, which is the user's choice.
vllm_max_num_batched_tokens is among them only for goals whose trials fill a step: the prompts of one stream do not.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard_vllm.options import VllmOptions, max_model_len, max_num_seqs

DEFAULT_BATCHED_TOKENS = 2048  # vLLM's default for one step
_BATCHED_TOKENS = {"batch": (512, DEFAULT_BATCHED_TOKENS, 8192), "memory": (512, DEFAULT_BATCHED_TOKENS)}


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    options: VllmOptions = spec.options
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8, 16, *((32, 64) if here.gpus else ())), stage=1, place="cache")
        if options.vllm_max_num_seqs is not None:  # unset it follows `parallel`
            conversations = sum(info.parallel for info in spec.caches.values())
            yield Knob(name="vllm_max_num_seqs", values=(conversations,), stage=2)
    yield Knob(name="vllm_enforce_eager", values=(False, True), stage=3)
    if goal in _BATCHED_TOKENS:
        yield Knob(name="vllm_max_num_batched_tokens", values=_BATCHED_TOKENS[goal], stage=4)
    if goal != "memory":  # the size of the KV cache is given in bytes, whatever the number format
        yield Knob(name="vllm_kv_cache_dtype", values=("auto", "fp8"), stage=5, lossy=True)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    return current_values(spec, cache, DEFAULT_BATCHED_TOKENS)


def current_values(spec: EngineSpec, cache: str, default_batched_tokens: int) -> dict[str, Value]:
    """`default_batched_tokens` is vLLM's own; it uses no more than all windows together."""
    options: VllmOptions = spec.options
    seqs = max_num_seqs(options, spec.caches)
    default = min(default_batched_tokens, seqs * max_model_len(spec.caches))
    return {
        "parallel": spec.caches[cache].parallel,
        "vllm_max_num_seqs": seqs,
        "vllm_max_num_batched_tokens": options.vllm_max_num_batched_tokens or default,
        "vllm_enforce_eager": options.vllm_enforce_eager,
        "vllm_kv_cache_dtype": options.vllm_kv_cache_dtype or "auto",
    }


def forbids(setting: Setting) -> str | None:
    values = setting.values
    seqs = int(values.get("vllm_max_num_seqs", values.get("parallel", 1)))
    if seqs > int(values.get("vllm_max_num_batched_tokens", seqs)):
        return "every request computes at least one token per step"
    return None
