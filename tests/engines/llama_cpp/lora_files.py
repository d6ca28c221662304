"""Random LoRA adapters as GGUF files, large enough in effect to change every answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.engines.llama_cpp.exact_models import write

RANK = 4


def write_lora(path: Path, *, width: int, layers: int, seed: int, strength: float = 0.5) -> Path:
    """On the output of each layer's attention, from `width` to `width`."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        name = f"blk.{layer}.attn_output.weight"
        tensors[f"{name}.lora_a"] = random.normal(0, strength, (RANK, width)).astype(np.float32)
        tensors[f"{name}.lora_b"] = random.normal(0, strength, (width, RANK)).astype(np.float32)
    facts = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    write(path, {**facts, "adapter.lora.alpha": float(RANK)}, tensors)
    return path
