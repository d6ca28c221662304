"""What the optimizer may turn of a model that a `vllm serve` runs: the same as of one that vLLM runs in process."""

from __future__ import annotations

from modelyard.core.engine import EngineSpec
from modelyard.core.knobs import Value
from modelyard.engines.vllm.knobs import STEP, forbids, held, knobs
from modelyard.telemetry.system import GpuMemory, read_gpus

__all__ = ["current", "forbids", "knobs"]

_GIB = 2**30


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    gpus = read_gpus()
    return held(spec, cache, step(gpus[0]) if gpus else STEP * _ranks(spec))


def step(gpu: GpuMemory) -> int:
    """Tokens that the server computes at a time where nobody says: more on a large GPU, but for one family."""
    if gpu.total >= 160 * _GIB:
        return 16384
    return 8192 if gpu.total >= 70 * _GIB and "a100" not in gpu.name.lower() else STEP


def _ranks(spec: EngineSpec) -> int:
    """Without GPUs every rank brings a step of its own."""
    return (spec.options.vllm_tensor_parallel_size or 1) * (spec.options.vllm_pipeline_parallel_size or 1)
