"""Tiny random GGUF models that embed, rank, fill in the middle or see, written once into the user's cache folder.

    bert, nomic-bert     a vocabulary of letters and a few words; every text has tokens
    qwen3, llama         SmolLM2's vocabulary; the qwen3 models append an end token, the llama has tokens for gaps
    llama, qwen2vl       with projectors for images and audio, the files that mmproj names

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


@cache
def seeing(kind: str) -> tuple[Path, Path]:
    """A model and its projector. `tiles` cuts an image into tiles, `block` reads it without a causal mask, `mrope` has
    positions in two dimensions, and `audio` takes sound. They are in one folder, under the names that belong together.
    """
    is_mrope = kind == "mrope"
    model = _made(
        f"{'qwen2vl' if is_mrope else 'llama'}-media",
        (lambda writer: _write_qwen2vl(writer)) if is_mrope else (lambda writer: _write_seeing_llama(writer)),
    )
    return model, _made(f"clip-{kind}", lambda writer: _PROJECTORS[kind](writer))


@cache
def base_coder() -> Path:
    """A causal model with the tokens for filling in the middle and without a chat template."""
    return _made("llama-base", lambda writer: _write_llama(writer, fim=True, template=False))


@cache
def greeter() -> Path:
    """A causal model that wants its first token before each prompt, and has sampling values."""
    return _made("llama-greeter", lambda writer: _write_llama(writer, fim=False, greets=True))


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

    def bias(self, name: str, size: int) -> None:
        self.add(f"{name}.bias", (size,), 0.1)

    def add(self, name: str, shape: tuple[int, ...], scale: float, dtype: Any = np.float32) -> None:
        self._writer.add_tensor(name, self._values(shape, scale).astype(dtype))

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


def _add_smollm2_vocabulary(
    writer: gguf.GGUFWriter, extra: dict[str, str], *, template: bool = True, first: int | None = None
) -> int:
    metadata, _ = read_contents(fetch())

    def value(name: str) -> Any:
        return metadata[f"tokenizer.ggml.{name}"]

    tokens, types = list(value("tokens")), list(value("token_type"))
    writer.add_tokenizer_model(value("model"))
    writer.add_tokenizer_pre(value("pre"))
    writer.add_token_list([*tokens, *extra.values()])
    writer.add_token_types([*types, *(gguf.TokenType.CONTROL for _ in extra)])
    writer.add_token_merges(value("merges"))
    writer.add_bos_token_id(value("bos_token_id") if first is None else first)
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


def _write_llama(writer: gguf.GGUFWriter, *, fim: bool, greets: bool = False, template: bool = True) -> None:
    _add_shape(writer, LONG_WINDOW)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    size = _add_smollm2_vocabulary(writer, _FIM if fim else {}, template=template, first=0 if greets else None)
    for at, name in enumerate(_FIM if fim else {}, size - len(_FIM)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", at)
    writer.add_add_bos_token(greets)
    if greets:
        writer.add_int32("general.sampling.top_k", 1)
        writer.add_float32("general.sampling.temp", 1.5)
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


# --- images and audio -------------------------------------------------------------------------------------------------

SIDE, PATCH = 32, 8  # pixels of an image or a tile, and of a patch
TILE_TOKENS = BLOCK_TOKENS = (SIDE // PATCH // 2) ** 2  # two by two patches are one token
_AUDIO_POSITIONS, _MELS, _STACKED = 1500, 16, 12  # 30 seconds
_TILE_MARKS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_MARKS = ["<fake_token_around_image>", "<global-img>", "<start_of_image>", "<end_of_image>", *_TILE_MARKS]
_QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def _write_seeing_llama(writer: gguf.GGUFWriter) -> None:
    _add_shape(writer, LONG_WINDOW)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    size = _add_smollm2_vocabulary(writer, {mark: mark for mark in _MARKS})
    writer.add_add_bos_token(False)
    writer.add_vocab_size(size)
    _add_decoder(_Tensors(writer, seed=5), size, normed_heads=False)


def _write_qwen2vl(writer: gguf.GGUFWriter) -> None:
    _add_shape(writer, LONG_WINDOW)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    size = _add_smollm2_vocabulary(writer, {mark: mark for mark in _QWEN_MARKS})
    writer.add_add_bos_token(False)
    tensors = _Tensors(writer, seed=6)
    _add_decoder(tensors, size, normed_heads=False)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v"):
            tensors.bias(f"blk.{layer}.{name}", WIDTH)


def _add_encoder(writer: gguf.GGUFWriter, kind: str, projector: str, seed: int) -> _Tensors:
    """The transformer that all projectors have; `kind` is vision or audio."""
    writer.add_bool(f"clip.has_{kind}_encoder", True)
    writer.add_string("clip.projector_type", projector)
    writer.add_file_type(0)
    numbers = {
        "embedding_length": WIDTH,
        "feed_forward_length": FEED,
        "block_count": LAYERS,
        "projection_dim": WIDTH,
        "attention.head_count": HEADS,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.{kind}.{name}", number)
    writer.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-6)
    writer.add_bool("clip.use_gelu", True)
    tensors = _Tensors(writer, seed)
    for layer in (f"{kind[0]}.blk.{at}" for at in range(LAYERS)):
        tensors.norm(f"{layer}.ln1")
        tensors.norm(f"{layer}.ln2")
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors.matrix(f"{layer}.{name}", WIDTH, bias=not (kind == "audio" and name == "attn_k"))
        tensors.matrix(f"{layer}.ffn_up", FEED, bias=True)
        tensors.matrix(f"{layer}.ffn_down", WIDTH, FEED, bias=True)
    tensors.norm(f"{kind[0]}.post_ln")
    return tensors


def _add_vision(writer: gguf.GGUFWriter, projector: str, seed: int) -> _Tensors:
    tensors = _add_encoder(writer, "vision", projector, seed)
    writer.add_uint32("clip.vision.image_size", SIDE)
    writer.add_uint32("clip.vision.patch_size", PATCH)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    tensors.add("v.patch_embd.weight", (WIDTH, 3, PATCH, PATCH), 0.2)
    return tensors


def _write_tiles(writer: gguf.GGUFWriter) -> None:
    tensors = _add_vision(writer, "idefics3", seed=7)
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.add_uint32("clip.vision.preproc_image_size", 2 * SIDE)
    tensors.add("v.patch_embd.bias", (WIDTH,), 0.1)
    tensors.matrix("v.position_embd", (SIDE // PATCH) ** 2)
    tensors.matrix("mm.model.fc", WIDTH, 4 * WIDTH)


def _write_block(writer: gguf.GGUFWriter) -> None:
    tensors = _add_vision(writer, "gemma3", seed=8)
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    tensors.add("v.patch_embd.bias", (WIDTH,), 0.1)
    tensors.matrix("v.position_embd", (SIDE // PATCH) ** 2)
    tensors.matrix("mm.input_projection", WIDTH)
    tensors.norm("mm.soft_emb_norm", bias=False)


def _write_mrope(writer: gguf.GGUFWriter) -> None:
    tensors = _add_vision(writer, "qwen2vl_merger", seed=9)
    tensors.add("v.patch_embd.weight.1", (WIDTH, 3, PATCH, PATCH), 0.2)
    tensors.matrix("mm.0", 4 * WIDTH, 4 * WIDTH, bias=True)
    tensors.matrix("mm.2", WIDTH, 4 * WIDTH, bias=True)


def _write_audio(writer: gguf.GGUFWriter) -> None:
    tensors = _add_encoder(writer, "audio", "ultravox", seed=10)
    writer.add_uint32("clip.audio.num_mel_bins", _MELS)
    writer.add_uint32("clip.audio.projector.stack_factor", _STACKED)
    tensors.matrix("a.position_embd", _AUDIO_POSITIONS)
    for number, inputs in ((1, _MELS), (2, WIDTH)):
        tensors.add(f"a.conv1d.{number}.weight", (WIDTH, inputs, 3), 0.2, np.float16)
        tensors.add(f"a.conv1d.{number}.bias", (WIDTH, 1), 0.1)
    tensors.matrix("mm.a.mlp.1", 2 * WIDTH, _STACKED * WIDTH)
    tensors.matrix("mm.a.mlp.2", WIDTH)
    tensors.norm("mm.a.norm_pre", _STACKED * WIDTH, bias=False)
    tensors.norm("mm.a.norm_mid", bias=False)


_PROJECTORS: dict[str, Callable[[gguf.GGUFWriter], None]] = {
    "tiles": _write_tiles,
    "block": _write_block,
    "mrope": _write_mrope,
    "audio": _write_audio,
}
