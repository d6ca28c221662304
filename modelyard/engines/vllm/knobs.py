"""What the optimizer may turn of a model that vLLM runs, in process or served.

The share of GPU memory is none of them: it decides what else fits beside the model, which is the user's to say. How
many tokens a step computes is one only where a trial could show it: the prompts of a single stream fill none.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.engines.vllm.options import VllmOptions, max_model_len, max_num_seqs

DEFAULT_BATCHED_TOKENS = 2048  # tokens that vLLM computes in one step where nobody says
_STEPS = {"batch": (512, DEFAULT_BATCHED_TOKENS, 8192), "memory": (512, DEFAULT_BATCHED_TOKENS)}


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    options: VllmOptions = spec.options
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8, 16, *((32, 64) if here.gpus else ())), stage=1, place="cache")
        if options.vllm_max_num_seqs is not None:  # else it is as many as there are places
            yield Knob(name="vllm_max_num_seqs", values=(_conversations(spec),), stage=2)
    yield Knob(name="vllm_enforce_eager", values=(False, True), stage=3)
    if goal in _STEPS:
        yield Knob(name="vllm_max_num_batched_tokens", values=_STEPS[goal], stage=4)
    if goal != "memory":  # a KV cache of so many bytes has as many, whatever the numbers in it
        yield Knob(name="vllm_kv_cache_dtype", values=("auto", "fp8"), stage=5, lossy=True)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    return current_values(spec, cache, DEFAULT_BATCHED_TOKENS)


def current_values(spec: EngineSpec, cache: str, step: int) -> dict[str, Value]:
    """`step` is what vLLM takes by itself, and never more than all windows together."""
    options: VllmOptions = spec.options
    at_once = max_num_seqs(options, spec.caches)
    return {
        "parallel": spec.caches[cache].parallel,
        "vllm_max_num_seqs": at_once,
        "vllm_max_num_batched_tokens": options.vllm_max_num_batched_tokens
        or min(step, at_once * max_model_len(spec.caches)),
        "vllm_enforce_eager": options.vllm_enforce_eager,
        "vllm_kv_cache_dtype": options.vllm_kv_cache_dtype or "auto",
    }


def _conversations(spec: EngineSpec) -> int:
    return sum(info.parallel for info in spec.caches.values())


def forbids(setting: Setting) -> str | None:
    told = setting.values
    at_once = int(told.get("vllm_max_num_seqs", told.get("parallel", 1)))
    if at_once > int(told.get("vllm_max_num_batched_tokens", at_once)):
        return "every request computes a token a step"
    return None
