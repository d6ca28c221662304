"""What the optimizer may turn of a model that vLLM runs, in process or served.

The share of GPU memory is none of them: it decides what else fits beside the model, which is the user's to say.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import EngineSpec, Machine
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.engines.vllm.settings import VllmSettings

_BATCHED = 8192  # what vLLM takes on large GPUs where nobody says


def knobs(spec: EngineSpec, here: Machine, goal: Goal) -> Iterator[Knob]:
    del spec, here
    if goal == "batch":
        yield Knob(name="vllm_max_num_seqs", values=(1, 4, 8, 16, 32, 64, 128, 256), stage=1)
    yield Knob(name="vllm_max_num_batched_tokens", values=(2048, 4096, 8192, 16384), stage=2)
    yield Knob(name="vllm_enforce_eager", values=(False, True), stage=3)
    yield Knob(name="vllm_kv_cache_dtype", values=("auto", "fp8"), stage=4, lossy=True)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    del cache
    options: VllmSettings = spec.options
    places = sum(info.parallel for info in spec.caches.values())
    return {
        "vllm_max_num_seqs": options.vllm_max_num_seqs or places,
        "vllm_max_num_batched_tokens": options.vllm_max_num_batched_tokens or _BATCHED,
        "vllm_enforce_eager": options.vllm_enforce_eager,
        "vllm_kv_cache_dtype": options.vllm_kv_cache_dtype or "auto",
    }


def forbids(setting: Setting) -> str | None:
    told = setting.values
    if int(told.get("vllm_max_num_seqs", 1)) > int(told["vllm_max_num_batched_tokens"]):
        return "every request computes a token a step"
    return None
