"""What lies in a CTranslate2 model's folder: the words of its vocabulary, and the names and shapes of its weights."""

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
_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_MOST = 1 << 20  # of names and dimensions: more is a broken file


class Ct2Variable(Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def find_folder(path: str) -> Path:
    return locate_model_folder(path, WEIGHTS)


def read_vocabulary(folder: Path) -> list[str]:
    """The token of each id. CTranslate2 takes prompts by spelling only, so no two may be spelled alike."""
    found = _read_words(folder)
    if len(set(found)) != len(found):
        raise InvalidRequest(
            f"{folder} has a vocabulary in which two tokens are spelled alike", code="model_unreadable"
        )
    return found


def _read_words(folder: Path) -> list[str]:
    try:
        if (file := folder / "vocabulary.json").is_file():
            return msgspec.json.decode(file.read_bytes(), type=list[str])
        return (folder / "vocabulary.txt").read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"{folder} has no readable vocabulary.json: {error}. Convert the model again", code="model_unreadable"
        ) from error


def read_trained_length(folder: Path) -> int | None:
    """As far as the tokenizer's settings tell; some say «endless» by a very large number."""
    try:
        told: Any = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes()).get("model_max_length")
    except (OSError, msgspec.MsgspecError, AttributeError):
        return None
    return told if isinstance(told, int) and told < 1 << 30 else None


def read_variables(folder: Path) -> dict[str, Ct2Variable]:
    """Names and shapes of all weights, without the weights."""
    file = folder / WEIGHTS
    try:
        with file.open("rb") as opened:
            return dict(_variables(opened))
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise InvalidRequest(f"{file} is no CTranslate2 model: {error}", code="model_unreadable") from error


def _variables(file: IO[bytes]) -> Iterator[tuple[str, Ct2Variable]]:
    (version,) = _unpack(file, "I")
    if not 4 <= version <= 64:
        raise ValueError(f"its format version is {version}")
    _text(file)
    _, count = _unpack(file, "II")
    for _ in range(min(count, _MOST)):
        name = _text(file)
        (dimensions,) = _unpack(file, "B")
        shape = _unpack(file, f"{dimensions}I")
        kind, size = _unpack(file, "BI")
        file.seek(size, 1)
        yield name, Ct2Variable(tuple(shape), _TYPES[kind], size)


def _text(file: IO[bytes]) -> str:
    (length,) = _unpack(file, "H")
    return file.read(length)[:-1].decode("utf-8", "replace")


def _unpack(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = "<" + form
    return struct.unpack(form, file.read(struct.calcsize(form)))
