"""Reads the metadata at the head of a GGUF file: names to numbers, texts and lists, without the tensors."""

from __future__ import annotations

import struct
from typing import IO, Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


def read_metadata(file: IO[bytes]) -> dict[str, Any]:
    magic, version, _tensors, count = _unpack(file, "4sIQQ")
    if magic != b"GGUF" or version < 2:
        raise ValueError(f"not a GGUF file of version 2 or later: {magic!r}, version {version}")
    return {_text(file): _value(file, _unpack(file, "I")[0]) for _ in range(count)}


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind == _LIST:
        inner, count = _unpack(file, "IQ")
        return [_value(file, inner) for _ in range(count)]
    if kind not in _SCALARS:
        raise ValueError(f"a GGUF value of the unknown kind {kind}")
    return _unpack(file, _SCALARS[kind])[0]


def _text(file: IO[bytes]) -> str:
    return _take(file, _unpack(file, "Q")[0]).decode()


def _unpack(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = "<" + form
    return struct.unpack(form, _take(file, struct.calcsize(form)))


def _take(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the GGUF file ends in the middle of its metadata")
    return data
