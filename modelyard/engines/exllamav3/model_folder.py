"""What lies in an EXL3 model's folder: its config, its vocabulary, and the names and sizes of its weights."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.library.model_files import locate_model_folder

CONFIG = "config.json"
_LONGEST_HEAD = 100 << 20  # what the format itself allows
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class ExllamaModelInfo(Struct, frozen=True):
    """What of a model decides its memory. `weights` and `embedding` are bytes; the latter stays in RAM."""

    weights: int
    embedding: int
    layers: int
    width: int
    inner: int
    kv_width: int  # of one layer's keys, and of its values
    vocab: int
    trained: int | None
    ends: tuple[int, ...]


def find_folder(path: str) -> Path:
    return locate_model_folder(path, CONFIG)


def read_model_info(folder: Path) -> ExllamaModelInfo:
    """Raises where a file is broken: loading would say so later, and less clearly."""
    about = _read(folder / CONFIG)
    text = about | about.get("text_config", {})
    sizes = _sizes(folder)
    embedding = sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
    try:
        return _shape(text, sum(sizes.values()) - embedding, embedding, _ends(folder, text))
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(folder / CONFIG, f"it tells no {error}") from error


def _shape(text: dict[str, Any], weights: int, embedding: int, ends: tuple[int, ...]) -> ExllamaModelInfo:
    heads = int(text["num_attention_heads"])
    width = int(text["hidden_size"])
    of_head = int(text.get("head_dim") or width // heads)
    return ExllamaModelInfo(
        weights=weights,
        embedding=embedding,
        layers=int(text["num_hidden_layers"]),
        width=width,
        inner=int(text.get("intermediate_size") or 4 * width),
        kv_width=int(text.get("num_key_value_heads") or heads) * of_head,
        vocab=int(text["vocab_size"]),
        trained=text.get("max_position_embeddings"),
        ends=ends,
    )


def _ends(folder: Path, text: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer; generation_config.json knows better where both tell."""
    file = folder / "generation_config.json"
    told = (_read(file) if file.is_file() else {}).get("eos_token_id", text.get("eos_token_id"))
    return tuple(told) if isinstance(told, list) else () if told is None else (int(told),)


def tokenizer_text(folder: Path) -> str:
    """tokenizer.json with every marker a special token, also those that the file calls ordinary: what a grammar's
    strings match must be spelled in text. Runs of white space stay, which some families have among the added tokens."""
    about = _read(folder / "tokenizer.json")
    for token in about.get("added_tokens", ()):
        token["special"] = token["special"] or bool(token["content"].strip())
    return msgspec.json.encode(about).decode()


# --- files ----------------------------------------------------------------------------------------------------------


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise _unreadable(file, str(error)) from error


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of each tensor, from the heads of all weight files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{folder} holds no .safetensors file with weights", code="model_unreadable")
    return {name: size for file in files for name, size in _head(file).items()}


def _head(file: Path) -> dict[str, int]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEAD:
                raise ValueError("its head is longer than the format allows")
            about = msgspec.json.decode(opened.read(length), type=dict[str, dict[str, Any]])
        about.pop("__metadata__", None)
        ends = [one["data_offsets"][1] for one in about.values()]
        if 8 + length + max(ends, default=0) != file.stat().st_size:
            raise ValueError("it is not as long as its head says")
        return {name: _size(one) for name, one in about.items()}
    except (OSError, ValueError, KeyError, TypeError, struct.error, msgspec.MsgspecError) as error:
        raise _unreadable(file, str(error)) from error


def _size(tensor: dict[str, Any]) -> int:
    return int(prod(tensor["shape"])) * _BYTES.get(tensor["dtype"], 1)


def _unreadable(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{file} cannot be read: {why}", code="model_unreadable")
