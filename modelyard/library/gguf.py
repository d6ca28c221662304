"""Reads the head of a GGUF file: names to numbers, texts and lists, and the shapes of the tensors, never their data."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.library.model_files import split_parts

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_SHORT = 1024  # a list up to here is one number a layer
_LONGEST = 1 << 28  # of one text: more is a broken length
# llama.cpp's names of general.file_type
_QUANTS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}


class GgufSummary(Struct, frozen=True):
    """What a model file says of itself. Zero or empty: it does not say."""

    architecture: str = ""
    name: str = ""
    parameters: int = 0
    quant: str = ""
    trained_context: int = 0
    layers: int = 0
    size: int = 0


class TensorInfo(Struct, frozen=True):
    """Where a tensor lies in its file. `shape` has rows first, as in numpy; `kind` is ggml's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def read_summary(file: Path) -> GgufSummary:
    """Of the whole model, all its parts together."""
    try:
        heads = [_head(part) for part in split_parts(file)]
        size = sum(part.stat().st_size for part in split_parts(file))
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{file} is not a readable GGUF file: {error}", code="model_unreadable") from error
    about, family = heads[0][0], str(heads[0][0].get("general.architecture", ""))
    return GgufSummary(
        family,
        str(about.get("general.name", "")),
        sum(count for _, count in heads),
        _QUANTS.get(about.get("general.file_type", -1), ""),
        about.get(f"{family}.context_length", 0),
        about.get(f"{family}.block_count", 0),
        size,
    )


def _head(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        tensors, count = _counts(file)
        metadata = dict(_entries(file, count, lists="none"))
        return metadata, sum(_elements(file) for _ in range(tensors))


def read_metadata(file: IO[bytes]) -> dict[str, Any]:
    """All of it, lists of tokens included. A ValueError says what is wrong with the file."""
    _tensors, count = _counts(file)
    return dict(_entries(file, count, lists="all"))


def without_tensors(path: Path) -> bytes:
    """The file as if it were the whole of a model that has no tensors: enough to read its vocabulary from."""
    try:
        with path.open("rb") as file:
            _tensors, count = _counts(file)
            begin, spans = file.tell(), []
            for name, _ in _entries(file, count, lists="short"):
                if not name.startswith("split."):  # or the other parts would be looked for
                    spans.append((begin, file.tell()))
                begin = file.tell()
            return _spliced(file, spans)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{path} is not a readable GGUF file: {error}", code="model_unreadable") from error


def _spliced(file: IO[bytes], spans: list[tuple[int, int]]) -> bytes:
    file.seek(0)
    magic, version = _unpack(file, "4sI")
    told = [struct.pack("<4sIQQ", magic, version, 0, len(spans))]
    for begin, end in spans:
        file.seek(begin)
        told.append(_take(file, end - begin))
    return b"".join(told)


def read_contents(path: Path, *, lists: Literal["short", "all"] = "all") -> tuple[dict[str, Any], list[TensorInfo]]:
    """The metadata, and where each tensor lies. With `lists="short"` a list that is longer than a model has layers,
    such as the vocabulary, is replaced by its length."""
    try:
        with path.open("rb") as file:
            tensors, count = _counts(file)
            metadata = dict(_entries(file, count, lists=lists))
            places = [_place(file) for _ in range(tensors)]
            return metadata, _from_start(places, file.tell(), int(metadata.get("general.alignment", 32)))
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{path} is not a readable GGUF file: {error}", code="model_unreadable") from error


def _from_start(places: list[TensorInfo], head: int, alignment: int) -> list[TensorInfo]:
    """The file counts from where the data begin, which is the next aligned byte after its head."""
    begin = -(-head // alignment) * alignment
    return [TensorInfo(place.name, place.shape, place.kind, begin + place.offset) for place in places]


def _counts(file: IO[bytes]) -> tuple[int, int]:
    magic, version, tensors, count = _unpack(file, "4sIQQ")
    if magic != b"GGUF" or version < 2:
        raise ValueError(f"not a GGUF file of version 2 or later: {magic!r}, version {version}")
    return tensors, count


def _entries(file: IO[bytes], count: int, *, lists: Literal["none", "short", "all"]) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        name = _text(file)
        kind = _unpack(file, "I")[0]
        if kind == _LIST and lists != "all":
            held = _skim_list(file)
            if lists == "short":
                yield name, held
        else:
            yield name, _value(file, kind)


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind == _LIST:
        inner, count = _unpack(file, "IQ")
        _check_inner(inner)
        return [_value(file, inner) for _ in range(count)]
    if kind not in _SCALARS:
        raise ValueError(f"a GGUF value of the unknown kind {kind}")
    return _unpack(file, _SCALARS[kind])[0]


def _skim_list(file: IO[bytes]) -> list[Any] | int:
    """Its numbers where they are few, else how many it holds."""
    inner, count = _unpack(file, "IQ")
    _check_inner(inner)
    if inner != _TEXT and count <= _SHORT:
        return [_value(file, inner) for _ in range(count)]
    if inner != _TEXT:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
        return int(count)
    for _ in range(count):
        file.seek(_length(file), 1)
    return int(count)


def _check_inner(kind: int) -> None:
    if kind != _TEXT and kind not in _SCALARS:
        raise ValueError(f"a GGUF list of the unknown kind {kind}")


def _elements(file: IO[bytes]) -> int:
    """How many numbers the next tensor holds."""
    return math.prod(_place(file).shape)


def _place(file: IO[bytes]) -> TensorInfo:
    name = _text(file)
    (dimensions,) = _unpack(file, "I")
    if dimensions > 8:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    shape = _unpack(file, f"{dimensions}Q")
    kind, offset = _unpack(file, "IQ")
    return TensorInfo(name, tuple(reversed(shape)), kind, offset)


def _text(file: IO[bytes]) -> str:
    return _take(file, _length(file)).decode("utf-8", "replace")


def _length(file: IO[bytes]) -> int:
    length: int = _unpack(file, "Q")[0]
    if length > _LONGEST:
        raise ValueError(f"a text of {length} bytes")
    return length


def _unpack(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = "<" + form
    return struct.unpack(form, _take(file, struct.calcsize(form)))


def _take(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the GGUF file ends in the middle of its metadata")
    return data
