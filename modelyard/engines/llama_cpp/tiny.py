"""A tiny random model as a GGUF file, so that the self-test can compute without anybody's weights.

Each layer has another type of weights, because each type has kernels of its own: those for AMX, for AVX-512 and the
plain ones. The model knows no words: token ids go in, logits come out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random

from msgspec import Struct

WIDTH = VOCAB = 256
_HEADS, _ALIGN = 4, 32
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Quant(Struct, frozen=True):
    """A type of weights: blocks of `weights` in `size` bytes, random but for the numbers that scale a block, which
    stand at the given places and keep the weights near ±0.1."""

    id: int
    weights: int
    size: int
    scales: tuple[tuple[int, float], ...]


QUANTS = {
    "q4_0": Quant(2, 32, 18, ((0, 0.013),)),
    "q4_1": Quant(3, 32, 20, ((0, 0.013), (2, -0.0975))),
    "q8_0": Quant(8, 32, 34, ((0, 0.0008),)),
    "q4_k": Quant(12, 256, 144, ((0, 0.0002), (2, 0.0015))),
    "q5_k": Quant(13, 256, 176, ((0, 0.0001), (2, 0.0015))),
    "q6_k": Quant(14, 256, 210, ((208, 0.0001),)),
}
_F32, _F16 = 0, 1


class Tensor(Struct, frozen=True):
    name: str
    type: int
    shape: tuple[int, ...]
    data: bytes


def write(path: Path) -> None:
    """Always the same bytes."""
    tensors = list(_tensors(Random(7)))  # noqa: S311 nothing secret
    facts = list(_facts())
    sizes = [_padded(len(tensor.data)) for tensor in tensors]
    offsets = [0, *accumulate(sizes)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)) + b"".join(facts)
    head += b"".join(_entry(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=False))
    body = b"".join(tensor.data.ljust(size, b"\0") for tensor, size in zip(tensors, sizes, strict=True))
    path.write_bytes(head.ljust(_padded(len(head)), b"\0") + body)


def _tensors(random: Random) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", _F16, (WIDTH, VOCAB), _halves(random))
    yield _norm("output_norm")
    yield Tensor("output.weight", _F16, (WIDTH, VOCAB), _halves(random))
    for layer, quant in enumerate(QUANTS.values()):
        yield _norm(f"blk.{layer}.attn_norm")
        yield _norm(f"blk.{layer}.ffn_norm")
        for name in _MATRICES:
            yield Tensor(f"blk.{layer}.{name}.weight", quant.id, (WIDTH, WIDTH), _blocks(quant, random))


def _norm(name: str) -> Tensor:
    return Tensor(f"{name}.weight", _F32, (WIDTH,), struct.pack(f"<{WIDTH}f", *[1.0] * WIDTH))


def _halves(random: Random) -> bytes:
    return struct.pack(f"<{WIDTH * VOCAB}e", *(random.uniform(-0.1, 0.1) for _ in range(WIDTH * VOCAB)))


def _blocks(quant: Quant, random: Random) -> bytes:
    count = WIDTH * WIDTH // quant.weights
    data = bytearray(random.randbytes(count * quant.size))
    for block in range(0, len(data), quant.size):
        for place, value in quant.scales:
            struct.pack_into("<e", data, block + place, value)
    return bytes(data)


def _facts() -> Iterator[bytes]:
    for key, text in (("general.architecture", "llama"), ("tokenizer.ggml.model", "no_vocab")):
        yield _string(key) + struct.pack("<I", 8) + _string(text)
    numbers = {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": len(QUANTS),
        "feed_forward_length": WIDTH,
        "attention.head_count": _HEADS,
        "rope.dimension_count": WIDTH // _HEADS,
        "vocab_size": VOCAB,
    }
    for key, number in numbers.items():
        yield _string(f"llama.{key}") + struct.pack("<II", 4, number)
    yield _string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)


def _entry(tensor: Tensor, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _string(tensor.name) + shape + struct.pack("<IQ", tensor.type, offset)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
