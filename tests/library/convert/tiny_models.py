"""Tiny GGUF models with random weights and a tokenizer, complete enough to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from modelyard.tokenizer.detokenize import BYTE_OF

WIDTH, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 64, 2, 4, 2, 96, 256
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ġwo rl", "Ġworl d"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokens() -> list[str]:
    return [*SPECIALS, *BYTE_OF, *(merge.replace(" ", "") for merge in MERGES)]


def write_tokenizer(
    writer: GGUFWriter, *, pre: str = "smollm", words: list[str] | None = None, merges: Any = None
) -> None:
    words = words or tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIALS else 1 for word in words])
    writer.add_token_merges(merges or MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_vocabulary(path: Path, pre: str, words: list[str], merges: list[str]) -> Path:
    """A file with a tokenizer and no weights."""
    writer = GGUFWriter(path, "llama")
    _write_shape(writer)
    write_tokenizer(writer, pre=pre, words=words, merges=merges)
    _finish(writer)
    return path


def write_model(path: Path, architecture: str = "llama", *, extra: dict[str, Any] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    _write_shape(writer)
    write_tokenizer(writer)
    for name, data in (random_weights(architecture) | (extra or {})).items():
        writer.add_tensor(name, data.astype(np.float32))
    _finish(writer)
    return path


def _write_shape(writer: GGUFWriter) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights(architecture: str) -> dict[str, Any]:
    random = np.random.default_rng(3)

    def make(*shape: int, scale: float = 0.2) -> Any:
        return random.normal(0, scale, shape)

    narrow = WIDTH // HEADS * KV_HEADS
    found = {"token_embd.weight": make(len(tokens()), WIDTH, scale=1.0), "output_norm.weight": 1 + make(WIDTH)}
    if architecture == "llama":  # qwen2 has tied embeddings
        found["output.weight"] = make(len(tokens()), WIDTH, scale=0.4)
    for n in range(LAYERS):
        rows = {"attn_q": WIDTH, "attn_k": narrow, "attn_v": narrow}
        found |= {f"blk.{n}.{name}.weight": make(count, WIDTH) for name, count in rows.items()}
        if architecture == "qwen2":
            found |= {f"blk.{n}.{name}.bias": make(count) for name, count in rows.items()}
        found |= {f"blk.{n}.{name}.weight": 1 + make(WIDTH) for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{n}.{name}.weight": make(INNER, WIDTH) for name in ("ffn_gate", "ffn_up")}
        found[f"blk.{n}.attn_output.weight"] = make(WIDTH, WIDTH)
        found[f"blk.{n}.ffn_down.weight"] = make(WIDTH, INNER)
    return found
