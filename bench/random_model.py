"""Writes a Llama with random weights of Q8_0, dense or with experts: for measurements where no model can be fetched.

    python -m bench.random_model FILE [--size 0.2b|8b|moe] [--spread N] [--vocabulary GGUF]

Without `--vocabulary` it has none: ids go in and ids come out. The weights are one random page, repeated: speed does
not depend on them, and eight billion of them take seconds. Only the speed of sampling depends on the logits. Without
`--spread` all tokens are nearly equally likely. With it every 64th token has logits of this standard deviation, and the
others of half of it: with 6 the tokens that have 95 % of the probability are 2 to 38 (10th and 90th percentile), and
the 48 most likely ones have 98.6 % of it in the middle; SmolLM2-135M has 1 to 120 and 99.1 %.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from modelyard.core.units import format_size
from modelyard.library.gguf import read_contents

_F32, _Q8_0, _BLOCK, _ALIGN = 0, 8, 34, 32  # ggml's types; the bytes of 32 weights
_PAGE = 1 << 20  # blocks
_SCALE = 2e-4  # of a weight of 8 bits; the logits of 4,096 such weights have a standard deviation of about 1
_LIKELY = 64  # one of so many tokens


class Dimensions(Struct, frozen=True):
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    experts: int = 0


SIZES = {
    "tiny": Dimensions(2, 256, 4, 4, 512, 128_256),
    "0.2b": Dimensions(12, 1024, 16, 16, 2816, 32_000),
    "8b": Dimensions(32, 4096, 32, 8, 14_336, 128_256),
    "moe": Dimensions(24, 2048, 16, 4, 1024, 32_000, experts=64),
}
Shapes = dict[str, tuple[int, ...]]  # rows first


def tensors(size: Dimensions) -> Shapes:
    kv = size.width // size.heads * size.kv_heads
    found: Shapes = {"token_embd.weight": (size.vocab, size.width), "output.weight": (size.vocab, size.width)}
    found["output_norm.weight"] = (size.width,)
    for layer in range(size.layers):
        own: Shapes = {
            "attn_norm": (size.width,),
            "ffn_norm": (size.width,),
            "attn_q": (size.width, size.width),
            "attn_k": (kv, size.width),
            "attn_v": (kv, size.width),
            "attn_output": (size.width, size.width),
        }
        for name, shape in {
            "ffn_gate": (size.inner, size.width),
            "ffn_up": (size.inner, size.width),
            "ffn_down": (size.width, size.inner),
        }.items():
            own |= {f"{name}_exps": (size.experts, *shape)} if size.experts else {name: shape}
        if size.experts:
            own["ffn_gate_inp"] = (size.experts, size.width)
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return found


def facts(size: Dimensions, vocabulary: Path | None = None) -> dict[str, Any]:
    """The metadata. A vocabulary that is smaller than the model's is filled up with words that are not used."""
    numbers: dict[str, int | float] = {
        "context_length": 32_768,
        "embedding_length": size.width,
        "block_count": size.layers,
        "vocab_size": size.vocab,
        "feed_forward_length": size.inner,
        "attention.head_count": size.heads,
        "attention.head_count_kv": size.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": size.width // size.heads,
    }
    if size.experts:
        numbers |= {"expert_count": size.experts, "expert_used_count": 4, "expert_feed_forward_length": size.inner}
    found: dict[str, Any] = {"general.architecture": "llama"}
    if vocabulary is None:
        found["tokenizer.ggml.model"] = "no_vocab"
    else:
        contents = read_contents(vocabulary)[0]
        found |= {key: value for key, value in contents.items() if key.startswith("tokenizer.")}
        words = found["tokenizer.ggml.tokens"]
        unused = size.vocab - len(words)
        if unused < 0:
            raise SystemExit(f"{vocabulary} has {len(words):,} tokens and the model {size.vocab:,}")
        found["tokenizer.ggml.tokens"] = [*words, *(f"<unused{number}>" for number in range(unused))]
        found["tokenizer.ggml.token_type"] = [*found["tokenizer.ggml.token_type"], *[5] * unused]
    return found | {f"llama.{key}": value for key, value in numbers.items()}


def write(file: Path, size: Dimensions, spread: float | None = None, vocabulary: Path | None = None) -> None:
    """As a GGUF file, version 3."""
    shapes, values = tensors(size), facts(size, vocabulary)
    page = _page(np.random.default_rng(1))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    head += b"".join(_string(key) + _value(value) for key, value in values.items())
    offset = 0
    for name, shape in shapes.items():
        kind = _kind(shape, name)
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        offset += _padded(_bytes(shape, kind))
    with file.open("wb") as out:
        out.write(head.ljust(_padded(len(head)), b"\0"))
        for name, shape in shapes.items():
            is_spread = name == "output.weight" and spread is not None
            pieces = _output(shape, spread or 1.0) if is_spread else _pieces(shape, _kind(shape, name), page)
            for piece in pieces:
                out.write(piece)


def _page(random: np.random.Generator) -> np.ndarray:
    page = np.empty((_PAGE, _BLOCK), np.uint8)
    page[:, :2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    page[:, 2:] = random.integers(0, 256, (_PAGE, _BLOCK - 2), np.uint8)
    return page


def _pieces(shape: tuple[int, ...], kind: int, page: np.ndarray) -> Iterator[bytes | memoryview]:
    left = size = _bytes(shape, kind)
    if kind == _F32:
        yield np.ones(shape, np.float32).tobytes()
        left = 0
    whole = memoryview(page.reshape(-1))
    while left:
        yield whole[: min(left, len(whole))]
        left -= min(left, len(whole))
    yield bytes(_padded(size) - size)


def _output(shape: tuple[int, ...], spread: float) -> Iterator[bytes | memoryview]:
    """No two tokens have the same weights."""
    random, (tokens, width) = np.random.default_rng(2), shape
    blocks, scale = width // 32, _SCALE * spread * (4096 / width) ** 0.5
    step = _PAGE // blocks
    for start in range(0, tokens, step):
        page = _page(random)[: min(step, tokens - start) * blocks]
        likely = np.repeat(np.arange(start, start + len(page) // blocks) % _LIKELY == 0, blocks)
        page[:, :2] = np.where(likely, scale, scale / 2).astype(np.float16).view(np.uint8).reshape(-1, 2)
        yield memoryview(page.reshape(-1))
    size = _bytes(shape, _Q8_0)
    yield bytes(_padded(size) - size)


def _kind(shape: tuple[int, ...], name: str) -> int:
    return _F32 if len(shape) == 1 or "gate_inp" in name else _Q8_0


def _bytes(shape: tuple[int, ...], kind: int) -> int:
    count = int(np.prod(shape))
    return 4 * count if kind == _F32 else count // 32 * _BLOCK


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: Any) -> tuple[int, bytes]:
    """The type's number, and the value. The elements of a list have the type of the first; integers are signed there,
    as llama.cpp wants those of a vocabulary."""
    if isinstance(value, list):
        kinds = {str: 8, int: 5, float: 6}
        kind = kinds[type(value[0])]
        items = b"".join(map(_string, value)) if kind == 8 else struct.pack(f"<{len(value)}{'if'[kind - 5]}", *value)
        return 9, struct.pack("<IQ", kind, len(value)) + items
    if isinstance(value, str):
        return 8, _string(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    return (4, struct.pack("<I", value)) if isinstance(value, int) else (6, struct.pack("<f", value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.2b")
    parser.add_argument("--spread", type=float, help="standard deviation of the logits of likely tokens")
    parser.add_argument("--vocabulary", type=Path, help="a GGUF file whose tokenizer the model gets")
    options = parser.parse_args()
    write(options.file, SIZES[options.size], options.spread, options.vocabulary)
    print(f"{options.file}: {format_size(options.file.stat().st_size)}")


if __name__ == "__main__":
    main()
