"""Tiny random models with unquantized weights: the same answer in any batch, to many digits.

Quantized weights round what goes through them to eight bits, so a difference in the last bit grows to tenths of a nat.
Here nothing is rounded, and each token's weight in the answer is large: KV of another sequence shows at once.
They have no words: ids go in and ids come out. One attends to everything, one slides a window over the past, one keeps
a state instead of a past, and one has layers of either kind.
"""

from __future__ import annotations

import atexit
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np

VOCAB, N_SWA = 256, 16
_WIDTH, _LAYERS, _HEADS, _ALIGN = 64, 2, 4, 32
_INNER, _STATE, _KERNEL, _RANK = 128, 16, 4, 8  # of the recurrent one
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_COMMON = {
    "context_length": 1024,
    "embedding_length": _WIDTH,
    "block_count": _LAYERS,
    "vocab_size": VOCAB,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_HEADED = _COMMON | {"feed_forward_length": _WIDTH, "attention.head_count": _HEADS}
_NORM = np.ones(_WIDTH, np.float32)

Fact = str | int | float | list[int]
Facts = Mapping[str, Fact]
Tensors = dict[str, Any]


@cache
def exact_model() -> Path:
    return _made("llama", _HEADED | {"rope.dimension_count": _WIDTH // _HEADS}, _llama())


@cache
def shallow_model() -> Path:
    """A single layer: the KV of a token depends on nothing but the token and its position."""
    facts = _HEADED | {"rope.dimension_count": _WIDTH // _HEADS, "block_count": 1}
    tensors = {name: data for name, data in _llama().items() if not name.startswith("blk.1.")}
    return _made("llama", facts, tensors)


@cache
def other_model() -> Path:
    """Like the exact one, with other weights."""
    return _made("llama", _HEADED | {"rope.dimension_count": _WIDTH // _HEADS}, _llama(seed=8))


@cache
def repetitive_model() -> Path:
    """The last token outweighs all before it, so its output soon repeats itself."""
    return _made("llama", _HEADED | {"rope.dimension_count": _WIDTH // _HEADS}, _llama(depth=0.03))


@cache
def sliding_model() -> Path:
    size = _WIDTH // _HEADS
    facts = {"attention.key_length": size, "attention.value_length": size, "attention.sliding_window": N_SWA}
    return _made("gemma2", _HEADED | facts | {"attention.head_count_kv": _HEADS}, _gemma())


@cache
def recurrent_model() -> Path:
    sizes = {"conv_kernel": _KERNEL, "inner_size": _INNER, "state_size": _STATE, "time_step_rank": _RANK}
    none = {"feed_forward_length": 0, "attention.head_count": 0}
    return _made("mamba", _COMMON | none | {f"ssm.{key}": size for key, size in sizes.items()}, _mamba())


@cache
def hybrid_model() -> Path:
    sizes = {"conv_kernel": _KERNEL, "inner_size": _INNER, "state_size": _STATE, "time_step_rank": _RANK}
    heads = {"attention.head_count_kv": [0, _HEADS], "expert_count": 0, "expert_used_count": 0}
    return _made("jamba", _HEADED | heads | {f"ssm.{key}": size for key, size in sizes.items()}, _jamba())


def _made(architecture: str, facts: Facts, tensors: Tensors) -> Path:
    folder = mkdtemp(prefix="modelyard-test-")
    atexit.register(rmtree, folder, ignore_errors=True)
    path = Path(folder) / f"{architecture}.gguf"
    names = {"general.architecture": architecture, "tokenizer.ggml.model": "no_vocab"}
    write(path, {**names, **{f"{architecture}.{key}": value for key, value in facts.items()}}, tensors)
    return path


class Weights:
    def __init__(self, seed: int = 7) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, rows: int, columns: int = _WIDTH, scale: float = 0.2) -> Any:
        return self._random.normal(0, scale, (rows, columns)).astype(np.float32)


def _llama(seed: int = 7, depth: float = 0.2) -> Tensors:
    make = Weights(seed)
    tensors = {"token_embd.weight": make(VOCAB, scale=1.0), "output_norm.weight": _NORM}
    tensors["output.weight"] = make(VOCAB, scale=0.4)
    return tensors | _layers(make, "attn_norm", "ffn_norm", scale=depth)


def _gemma() -> Tensors:
    make = Weights()
    # Words in and words out are one table: small, so that the layers outweigh the last word and do not just echo it.
    tensors = {"token_embd.weight": make(VOCAB, scale=0.05), "output_norm.weight": 8 * _NORM}
    return tensors | _layers(make, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def _layers(make: Weights, *norms: str, scale: float = 0.2) -> Tensors:
    tensors: Tensors = {}
    for layer in range(_LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": _NORM for name in norms}
        tensors |= {f"blk.{layer}.{name}.weight": make(_WIDTH, scale=scale) for name in _MATRICES}
    return tensors


def _mamba() -> Tensors:
    make = Weights()
    tensors = {"token_embd.weight": make(VOCAB, scale=1.0), "output_norm.weight": _NORM}
    tensors["output.weight"] = make(VOCAB, scale=0.4)
    for layer in range(_LAYERS):
        tensors |= {f"blk.{layer}.{name}": data for name, data in _mamba_layer(make).items()}
    return tensors


def _jamba() -> Tensors:
    """A recurrent layer and one with attention."""
    make = Weights()
    tensors = {"token_embd.weight": make(VOCAB, scale=1.0), "output_norm.weight": _NORM}
    tensors["output.weight"] = make(VOCAB, scale=0.4)
    norms = {"dt": _RANK, "b": _STATE, "c": _STATE}
    state = _mamba_layer(make) | {f"ssm_{key}_norm.weight": np.ones(size, np.float32) for key, size in norms.items()}
    attention = {"attn_norm.weight": _NORM} | {f"{name}.weight": make(_WIDTH) for name in _MATRICES[:4]}
    for layer, held in enumerate((state, attention)):
        feed = {"ffn_norm.weight": _NORM} | {f"{name}.weight": make(_WIDTH) for name in _MATRICES[4:]}
        tensors |= {f"blk.{layer}.{name}": data for name, data in (held | feed).items()}
    return tensors


def _mamba_layer(make: Weights) -> Tensors:
    decay = np.arange(1, _STATE + 1, dtype=np.float32) / 8  # slow enough for a whole prompt to count
    return {
        "attn_norm.weight": _NORM,
        "ssm_in.weight": make(2 * _INNER),
        "ssm_conv1d.weight": make(_INNER, _KERNEL, 0.5),
        "ssm_conv1d.bias": np.zeros(_INNER, np.float32),
        "ssm_x.weight": make(_RANK + 2 * _STATE, _INNER),
        "ssm_dt.weight": make(_INNER, _RANK),
        "ssm_dt.bias": np.full(_INNER, -2, np.float32),
        "ssm_a": -np.tile(decay, (_INNER, 1)),
        "ssm_d": np.ones(_INNER, np.float32),
        "ssm_out.weight": make(_WIDTH, _INNER),
    }


def write(path: Path, facts: Mapping[str, Fact], tensors: Tensors) -> None:
    """As a GGUF file, version 3."""
    head, body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)), b""
    head += b"".join(_string(key) + _value(value) for key, value in facts.items())
    for name, data in tensors.items():
        shape = struct.pack(f"<I{data.ndim}Q", data.ndim, *reversed(data.shape))
        head += _string(name) + shape + struct.pack("<IQ", 0, len(body))
        body += _padded(data.tobytes())
    path.write_bytes(_padded(head) + body)


def _value(value: Fact) -> bytes:
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // _ALIGN) * _ALIGN, b"\0")
