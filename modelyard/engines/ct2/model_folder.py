"""A CTranslate2 model's folder: its vocabulary, and the names and shapes of its weights."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.library.model_files import locate_model_folder

WEIGHTS = "model.bin"
_DTYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_MAX_VARIABLES = 1 << 20  # more means that the file is broken


class Ct2Variable(Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def find_folder(path: str) -> Path:
    return locate_model_folder(path, WEIGHTS)


def read_vocabulary(folder: Path) -> list[str]:
    """The text of each token id. CTranslate2 takes prompts as token texts, so they must be unique."""
    try:
        if (file := folder / "vocabulary.json").is_file():
            texts = msgspec.json.decode(file.read_bytes(), type=list[str])
        else:
            texts = (folder / "vocabulary.txt").read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"{folder} has no readable vocabulary.json: {error}. Convert the model again", code="model_unreadable"
        ) from error
    if len(set(texts)) != len(texts):
        raise InvalidRequest(f"the vocabulary of {folder} has two tokens with the same text", code="model_unreadable")
    return texts


def read_trained_length(folder: Path) -> int | None:
    """From the tokenizer's settings; some write «unlimited» as a very large number."""
    try:
        length: Any = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes()).get("model_max_length")
    except (OSError, msgspec.MsgspecError, AttributeError):
        return None
    return length if isinstance(length, int) and length < 1 << 30 else None


def read_variables(folder: Path) -> dict[str, Ct2Variable]:
    """Names and shapes of all weights, without the weights."""
    file = folder / WEIGHTS
    try:
        with file.open("rb") as stream:
            return dict(_variables(stream))
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise InvalidRequest(f"{file} is not a CTranslate2 model: {error}", code="model_unreadable") from error


def _variables(file: IO[bytes]) -> Iterator[tuple[str, Ct2Variable]]:
    (version,) = _unpack(file, "I")
    if not 4 <= version <= 64:
        raise ValueError(f"format version {version} is not supported")
    _text(file)
    _, count = _unpack(file, "II")
    for _ in range(min(count, _MAX_VARIABLES)):
        name = _text(file)
        (dimensions,) = _unpack(file, "B")
        shape = _unpack(file, f"{dimensions}I")
        dtype, size = _unpack(file, "BI")
        file.seek(size, 1)
        yield name, Ct2Variable(tuple(shape), _DTYPES[dtype], size)


def _text(file: IO[bytes]) -> str:
    (length,) = _unpack(file, "H")
    return file.read(length)[:-1].decode("utf-8", "replace")


def _unpack(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = "<" + form
    return struct.unpack(form, file.read(struct.calcsize(form)))
