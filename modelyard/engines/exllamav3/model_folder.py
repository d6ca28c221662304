"""An EXL3 model's folder: its dimensions, its vocabulary, and the sizes of its weights."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.engines.hf_folder import CONFIG, read_config, read_json, read_tensors
from modelyard.library.model_files import locate_model_folder

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class ExllamaModelInfo(Struct, frozen=True):
    """What determines a model's memory. `weights` and `embedding` are bytes; the embedding stays in RAM."""

    weights: int
    embedding: int
    layers: int
    hidden_size: int
    intermediate_size: int
    kv_width: int  # numbers per token in one layer's keys, and as many in its values
    n_vocab: int
    trained_length: int | None
    eos_ids: tuple[int, ...]


def find_folder(path: str) -> Path:
    return locate_model_folder(path, CONFIG)


def read_model_info(folder: Path) -> ExllamaModelInfo:
    """Raises if a file is broken: the library reports it later and less clearly."""
    config, sizes = read_config(folder), _tensor_sizes(folder)
    embedding = sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
    try:
        heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden_size // heads)
        return ExllamaModelInfo(
            weights=sum(sizes.values()) - embedding,
            embedding=embedding,
            layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(config.get("intermediate_size") or 4 * hidden_size),
            kv_width=int(config.get("num_key_value_heads") or heads) * head_dim,
            n_vocab=int(config["vocab_size"]),
            trained_length=config.get("max_position_embeddings"),
            eos_ids=_eos_ids(folder, config),
        )
    except (KeyError, TypeError, ValueError) as error:
        file = folder / CONFIG
        raise InvalidRequest(f"{file} lacks a usable value: {error}", code="model_unreadable") from error


def read_tokenizer(folder: Path) -> str:
    """tokenizer.json with every control token marked as special, also those that the file calls ordinary: a grammar's
    strings must match text only. Added tokens of white space, which some families have, stay ordinary."""
    tokenizer = read_json(folder / "tokenizer.json")
    for token in tokenizer.get("added_tokens", ()):
        token["special"] = token["special"] or bool(token["content"].strip())
    return msgspec.json.encode(tokenizer).decode()


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json takes precedence: it lists all tokens that end an answer."""
    file = folder / "generation_config.json"
    eos = (read_json(file) if file.is_file() else {}).get("eos_token_id", config.get("eos_token_id"))
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)


def _tensor_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor, from the headers of all weight files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{folder} holds no .safetensors file with weights", code="model_unreadable")
    return {
        name: int(prod(tensor["shape"])) * _BYTES.get(tensor["dtype"], 1)
        for file in files
        for name, tensor in read_tensors(file).items()
    }
