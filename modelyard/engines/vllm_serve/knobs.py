"""What the optimizer may turn of a model that a `vllm serve` runs: the same as of one that vLLM runs in process."""

from __future__ import annotations

from modelyard.engines.vllm.knobs import current, forbids, knobs

__all__ = ["current", "forbids", "knobs"]
