"""Hugging Face model folders: config.json and the headers of safetensors files, read without the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from modelyard.core.errors import InvalidRequest

CONFIG = "config.json"
_MAX_HEADER = 100 << 20  # bytes; the limit of the format


def read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise _unreadable(file, error) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; the language model's part of a multimodal model takes precedence over the outer fields."""
    config = read_json(folder / CONFIG)
    text = config.get("text_config") or config.get("llm_config")
    return {**config, **text} if isinstance(text, dict) else config


def read_template(folder: Path) -> str | None:
    """The chat template: a file of its own, or a field of tokenizer_config.json."""
    try:
        if (file := folder / "chat_template.jinja").is_file():
            return file.read_text("utf-8")
        found = read_json(folder / "tokenizer_config.json").get("chat_template")
    except (OSError, UnicodeDecodeError, InvalidRequest):
        return None
    return found if isinstance(found, str) else None


def read_tensors(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name → its dtype, shape and data_offsets. Raises if the file is not a complete safetensors file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes is not possible in a safetensors file")
            tensors = msgspec.json.decode(stream.read(length), type=dict[str, dict[str, Any]])
        tensors.pop("__metadata__", None)
        expected = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
        if (size := file.stat().st_size) != expected:
            raise ValueError(f"it has {size} bytes and should have {expected}")
    except (OSError, ValueError, TypeError, KeyError, IndexError, msgspec.MsgspecError) as error:
        raise _unreadable(file, error) from error
    return tensors


def _unreadable(file: Path, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{file} cannot be read: {error}", code="model_unreadable")
