"""A tiny random model with unquantized weights: the same answer in any batch, to many digits.

Quantized weights round what goes through them to eight bits, so a difference in the last bit grows to tenths of a nat.
Here nothing is rounded, and each token's weight in the answer is large: KV that belongs to somebody else shows at once.
It has no words: ids go in and ids come out.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

VOCAB = 256
_WIDTH, _LAYERS, _HEADS, _ALIGN = 64, 2, 4, 32
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

Tensors = dict[str, Any]


@cache
def exact_model() -> Path:
    path = Path(mkdtemp(prefix="modelyard-test-")) / "exact.gguf"
    write(path, _facts(), _tensors())
    return path


def _facts() -> dict[str, str | int | float]:
    numbers = {
        "context_length": 1024,
        "embedding_length": _WIDTH,
        "block_count": _LAYERS,
        "feed_forward_length": _WIDTH,
        "attention.head_count": _HEADS,
        "rope.dimension_count": _WIDTH // _HEADS,
        "vocab_size": VOCAB,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    names = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    return names | {f"llama.{key}": value for key, value in numbers.items()}


def _tensors() -> Tensors:
    random = np.random.default_rng(7)

    def matrix(rows: int, scale: float) -> Any:
        return random.normal(0, scale, (rows, _WIDTH)).astype(np.float32)

    norm = np.ones(_WIDTH, np.float32)
    tensors = {"token_embd": matrix(VOCAB, 1.0), "output_norm": norm, "output": matrix(VOCAB, 0.4)}
    for layer in range(_LAYERS):
        tensors |= {f"blk.{layer}.{name}": norm for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{layer}.{name}": matrix(_WIDTH, 0.2) for name in _MATRICES}
    return tensors


def write(path: Path, facts: dict[str, str | int | float], tensors: Tensors) -> None:
    """As a GGUF file, version 3."""
    head, body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)), b""
    head += b"".join(_string(key) + _value(value) for key, value in facts.items())
    for name, data in tensors.items():
        shape = struct.pack(f"<I{data.ndim}Q", data.ndim, *reversed(data.shape))
        head += _string(f"{name}.weight") + shape + struct.pack("<IQ", 0, len(body))
        body += _padded(data.tobytes())
    path.write_bytes(_padded(head) + body)


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // _ALIGN) * _ALIGN, b"\0")
