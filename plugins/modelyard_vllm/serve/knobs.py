"""The vllm serve engine's knobs for the optimizer: those of vLLM in process, with the server's defaults."""

from __future__ import annotations

from modelyard.core.engine import EngineSpec
from modelyard.core.knobs import Value
from modelyard.telemetry.system import GpuMemory, read_gpus
from modelyard_vllm.knobs import DEFAULT_BATCHED_TOKENS, current_values, forbids, knobs

__all__ = ["current", "forbids", "knobs"]

_GIB = 2**30


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    gpus = read_gpus()
    # Without GPUs every rank adds its own step.
    ranks = (spec.options.vllm_tensor_parallel_size or 1) * (spec.options.vllm_pipeline_parallel_size or 1)
    return current_values(spec, cache, default_step(gpus[0]) if gpus else DEFAULT_BATCHED_TOKENS * ranks)


def default_step(gpu: GpuMemory) -> int:
    """The server's default of max_num_batched_tokens: more on a large GPU, except on an A100."""
    if gpu.total >= 160 * _GIB:
        return 16384
    return 8192 if gpu.total >= 70 * _GIB and "a100" not in gpu.name.lower() else DEFAULT_BATCHED_TOKENS
