"""Writes a Hugging Face folder: config.json and the weights as safetensors, one tensor in memory at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelyard.library.convert.gguf_model import GgufModel, Weights

OnTensor = Callable[[int], None]  # how many numbers are done

TYPES = ("bfloat16", "float16", "float32")
_NAMES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


def write(source: GgufModel, folder: Path, dtype: str, on_tensor: OnTensor) -> None:
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(_config(source, dtype)), indent=2))
    with (folder / "model.safetensors").open("wb") as out:
        out.write(_head(source, dtype))
        for _, weights in source:
            out.write(_packed(weights, dtype))
            on_tensor(weights.size)


def _config(source: GgufModel, dtype: str) -> dict[str, Any]:
    shape, about = source.shape, source.metadata
    return {
        "architectures": [source.family.architecture],
        "model_type": source.family.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_base,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": about.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": about.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": about.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _head(source: GgufModel, dtype: str) -> bytes:
    """Names, types and places as JSON, with its length in front; spaces bring the data to an even place."""
    kind, size = _NAMES[dtype]
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in source.sizes.items():
        end = at + prod(shape) * size
        head[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(head)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _packed(weights: Weights, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return weights.astype(dtype).tobytes()
    bits = weights.view(np.uint32)  # bfloat16 is the upper half: round it to the nearest, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
