"""Tiny random GGUF models that embed, rank or fill in the middle, written once into the user's cache folder.

    bert, nomic-bert     a vocabulary of letters and a few words; every text has tokens
    qwen3, llama         SmolLM2's vocabulary; the qwen3 models append an end token, the llama has tokens for gaps

Their weights are random numbers of fixed seeds: vectors, scores and answers mean nothing, and are the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.default_model import fetch
from modelyard.library.gguf import read_contents

WIDTH, HEADS, LAYERS, FEED = 64, 4, 2, 96
BERT_WINDOW, LONG_WINDOW = 512, 2048
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the Query.<|im_end|>\n<|im_start|>user\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
)
_POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
_WORDS = "the cat dog sofa sleeps court tax appeal paris berlin capital of france is a on rejected kitten naps couch"
_FIM = {
    "fim_pre": "<|fim_prefix|>",
    "fim_suf": "<|fim_suffix|>",
    "fim_mid": "<|fim_middle|>",
    "fim_pad": "<|fim_pad|>",
    "fim_rep": "<|repo_name|>",
    "fim_sep": "<|file_sep|>",
}


@cache
def bert(pooling: str = "mean") -> Path:
    """`rank` has a classifier with one output."""
    return _made(f"bert-{pooling}", lambda writer: _write_bert(writer, pooling))


@cache
def nomic_bert() -> Path:
    """Rotary positions: longer inputs than one micro-batch of the default size."""
    return _made("nomic-bert", _write_nomic_bert)


@cache
def last_token_embedder() -> Path:
    """A causal model whose last token, an end token that the tokenizer appends, stands for the text."""
    return _made("qwen3-last", lambda writer: _write_qwen3(writer, "last"))


@cache
def last_token_ranker() -> Path:
    """A causal model that ranks, with its prompt in the file."""
    return _made("qwen3-rank", lambda writer: _write_qwen3(writer, "rank"))


@cache
def coder(fim: bool = True) -> Path:
    """A causal model. With `fim` its vocabulary has the tokens for filling in the middle."""
    return _made("llama-fim" if fim else "llama-plain", lambda writer: _write_llama(writer, fim=fim))


def _made(name: str, write: Callable[[gguf.GGUFWriter], None]) -> Path:
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = cache_dir() / "test-models" / f"{name}-{version}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_suffix(".lock")):
        if not path.is_file():
            for old in path.parent.glob(f"{name}-[0-9a-f]*.gguf"):
                old.unlink()
            partial = path.with_suffix(".partial")
            writer = gguf.GGUFWriter(partial, _architecture(name))
            write(writer)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            partial.rename(path)
    return path


def _architecture(name: str) -> str:
    return "nomic-bert" if name == "nomic-bert" else name.partition("-")[0]


class _Tensors:
    """Random tensors of a fixed seed."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer, self._random = writer, np.random.default_rng(seed)

    def matrix(self, name: str, rows: int, columns: int = WIDTH, *, bias: bool = False, scale: float = 0.2) -> None:
        self._writer.add_tensor(f"{name}.weight", self._values((rows, columns), scale))
        if bias:
            self._writer.add_tensor(f"{name}.bias", self._values((rows,), 0.1))

    def norm(self, name: str, size: int = WIDTH, *, bias: bool = True) -> None:
        self._writer.add_tensor(f"{name}.weight", 1 + self._values((size,), 0.1))
        if bias:
            self._writer.add_tensor(f"{name}.bias", self._values((size,), 0.1))

    def _values(self, shape: tuple[int, ...], scale: float) -> Any:
        return self._random.normal(0, scale, shape).astype(np.float32)


def _add_shape(writer: gguf.GGUFWriter, window: int) -> None:
    writer.add_context_length(window)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_file_type(0)


# --- encoders ---------------------------------------------------------------------------------------------------------


def _bert_tokens() -> list[str]:
    """WordPiece as GGUF stores it: ▁ marks the start of a word."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz0123456789", *".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+`~"]
    words = [word for word in _WORDS.split() if len(word) > 1]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{piece}" for piece in (*pieces, *words)), *pieces]


def _add_bert_vocabulary(writer: gguf.GGUFWriter) -> int:
    tokens = _bert_tokens()
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if token.startswith("[") and token[1:2].isupper() else gguf.TokenType.NORMAL
            for token in tokens
        ]
    )
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
    return len(tokens)


def _write_bert(writer: gguf.GGUFWriter, pooling: str) -> None:
    _add_shape(writer, BERT_WINDOW)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(_POOLING[pooling]))
    size = _add_bert_vocabulary(writer)
    tensors = _Tensors(writer, seed=1)
    tensors.matrix("token_embd", size, scale=1.0)
    tensors.matrix("position_embd", BERT_WINDOW, scale=0.3)
    tensors.matrix("token_types", 2)
    tensors.norm("token_embd_norm")
    for layer in (f"blk.{at}" for at in range(LAYERS)):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.matrix(f"{layer}.{name}", WIDTH, bias=True)
        tensors.norm(f"{layer}.attn_output_norm")
        tensors.matrix(f"{layer}.ffn_up", FEED, bias=True)
        tensors.matrix(f"{layer}.ffn_down", WIDTH, FEED, bias=True)
        tensors.norm(f"{layer}.layer_output_norm")
    if pooling == "rank":
        tensors.matrix("cls", WIDTH, bias=True)
        tensors.matrix("cls.output", 1, bias=True)


def _write_nomic_bert(writer: gguf.GGUFWriter) -> None:
    _add_shape(writer, LONG_WINDOW)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_rope_freq_base(1000.0)
    size = _add_bert_vocabulary(writer)
    tensors = _Tensors(writer, seed=2)
    tensors.matrix("token_embd", size, scale=1.0)
    tensors.matrix("token_types", 2)
    tensors.norm("token_embd_norm")
    for layer in (f"blk.{at}" for at in range(LAYERS)):
        tensors.matrix(f"{layer}.attn_qkv", 3 * WIDTH)
        tensors.matrix(f"{layer}.attn_output", WIDTH)
        tensors.norm(f"{layer}.attn_output_norm")
        tensors.matrix(f"{layer}.ffn_up", FEED)
        tensors.matrix(f"{layer}.ffn_gate", FEED)
        tensors.matrix(f"{layer}.ffn_down", WIDTH, FEED)
        tensors.norm(f"{layer}.layer_output_norm")


# --- decoders ---------------------------------------------------------------------------------------------------------


def _add_smollm2_vocabulary(writer: gguf.GGUFWriter, extra: dict[str, str], *, template: bool = True) -> int:
    metadata, _ = read_contents(fetch())

    def value(name: str) -> Any:
        return metadata[f"tokenizer.ggml.{name}"]

    tokens, types = list(value("tokens")), list(value("token_type"))
    writer.add_tokenizer_model(value("model"))
    writer.add_tokenizer_pre(value("pre"))
    writer.add_token_list([*tokens, *extra.values()])
    writer.add_token_types([*types, *(gguf.TokenType.CONTROL for _ in extra)])
    writer.add_token_merges(value("merges"))
    writer.add_bos_token_id(value("bos_token_id"))
    writer.add_eos_token_id(value("eos_token_id"))
    if template:
        writer.add_chat_template(metadata["tokenizer.chat_template"])
    return len(tokens) + len(extra)


def _write_qwen3(writer: gguf.GGUFWriter, pooling: str) -> None:
    _add_shape(writer, LONG_WINDOW)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_pooling_type(gguf.PoolingType(_POOLING[pooling]))
    size = _add_smollm2_vocabulary(writer, {}, template=False)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    tensors = _Tensors(writer, seed=3)
    _add_decoder(tensors, size, normed_heads=True)
    if pooling == "rank":
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_string("tokenizer.chat_template.rerank", RERANK_TEMPLATE)
        writer.add_array("tokenizer.chat_templates", ["rerank"])
        tensors.matrix("cls.output", 2)


def _write_llama(writer: gguf.GGUFWriter, *, fim: bool) -> None:
    _add_shape(writer, LONG_WINDOW)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    size = _add_smollm2_vocabulary(writer, _FIM if fim else {})
    for at, name in enumerate(_FIM if fim else {}, size - len(_FIM)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", at)
    writer.add_add_bos_token(False)
    writer.add_vocab_size(size)
    _add_decoder(_Tensors(writer, seed=4), size, normed_heads=False)


def _add_decoder(tensors: _Tensors, size: int, *, normed_heads: bool) -> None:
    tensors.matrix("token_embd", size, scale=1.0)
    tensors.norm("output_norm", bias=False)
    for layer in (f"blk.{at}" for at in range(LAYERS)):
        tensors.norm(f"{layer}.attn_norm", bias=False)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.matrix(f"{layer}.{name}", WIDTH)
        if normed_heads:
            tensors.norm(f"{layer}.attn_q_norm", WIDTH // HEADS, bias=False)
            tensors.norm(f"{layer}.attn_k_norm", WIDTH // HEADS, bias=False)
        tensors.norm(f"{layer}.ffn_norm", bias=False)
        tensors.matrix(f"{layer}.ffn_gate", FEED)
        tensors.matrix(f"{layer}.ffn_up", FEED)
        tensors.matrix(f"{layer}.ffn_down", WIDTH, FEED)
