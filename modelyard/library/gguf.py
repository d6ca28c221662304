"""Reads GGUF headers: the metadata and the shapes of the tensors, never their data."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.library import architectures
from modelyard.library.model_files import split_parts

Lists = Literal["none", "short", "all"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_SHORT = 1024  # elements of a list with one number per layer
_MAX_STRING = 1 << 28  # bytes; more means a corrupt length
_MAX_LIST = 1 << 28
_MAX_COUNT = 1 << 22  # strings of a list, entries of the metadata, tensors
_MAX_DIMENSIONS = 8
# llama.cpp's names of general.file_type; numbers without a name are no longer in use
_QUANTIZATIONS = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M"), 7)),
    **dict(enumerate(("Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"), 16)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 25)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE"), 36)),
}


class GgufSummary(Struct, frozen=True):
    """The main metadata of a model. Zero or empty means unknown."""

    architecture: str = ""
    name: str = ""
    parameters: int = 0
    quant: str = ""
    trained_context: int = 0
    layers: int = 0
    size: int = 0


class TensorInfo(Struct, frozen=True):
    """A tensor in its file. `shape` has rows first, as in numpy; `kind` is the number of its ggml type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def read_summary(file: Path) -> GgufSummary:
    """The summary of a model with all its parts."""
    parts = split_parts(file)
    headers = [read_contents(part, lists="none") for part in parts]
    metadata = headers[0][0]
    architecture = str(metadata.get("general.architecture", ""))

    def number(name: str, default: int = 0) -> int:
        return value if isinstance(value := metadata.get(name), int) else default

    return GgufSummary(
        architecture,
        str(metadata.get("general.name", "")),
        sum(math.prod(tensor.shape) for _, tensors in headers for tensor in tensors),
        _QUANTIZATIONS.get(number("general.file_type", -1), ""),
        number(f"{architecture}.context_length"),
        number(f"{architecture}.block_count"),
        sum(part.stat().st_size for part in parts),
    )


Task = Literal["chat", "embedding", "reranking", "diffusion"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]

_POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")  # by llama.cpp's numbers


class ModelPurpose(Struct, frozen=True):
    """What a model was trained for. `pooling` says how the vectors of its tokens become one; None: the file does not
    say. A model that is not `causal` reads a text as a whole. `has_vectors` is False where llama.cpp has none."""

    task: Task = "chat"
    pooling: Pooling | None = None
    causal: bool = True
    has_vectors: bool = True


def model_purpose(metadata: Mapping[str, Any]) -> ModelPurpose:
    """A model with pooling embeds, one with the pooling `rank` ranks. A generating model's file has none."""
    architecture = str(metadata.get("general.architecture", ""))
    number = metadata.get(f"{architecture}.pooling_type")
    pooling = _POOLINGS[number] if isinstance(number, int) and 0 <= number < len(_POOLINGS) else None
    is_encoder = architecture in architectures.ENCODERS
    task: Task = "chat"
    if architecture in architectures.DIFFUSION:
        task = "diffusion"
    elif pooling == "rank":
        task = "reranking"
    elif is_encoder or pooling not in (None, "none"):
        task = "embedding"
    causal = not is_encoder and metadata.get(f"{architecture}.attention.causal") is not False
    return ModelPurpose(task, pooling, causal, architecture not in architectures.NO_EMBEDDINGS)


def read_architecture(file: Path) -> str:
    return str(read_contents(file, lists="none")[0].get("general.architecture", ""))


def read_purpose(file: Path) -> ModelPurpose:
    return model_purpose(read_contents(file, lists="none")[0])


def read_contents(path: Path, *, lists: Lists = "all") -> tuple[dict[str, Any], list[TensorInfo]]:
    """The metadata and the tensors of one file.

    `lists="short"` replaces a list that is longer than a model has layers, such as the vocabulary, by its length;
    `lists="none"` omits all lists.
    """
    with _opened(path) as file:
        tensor_count, count = _read_counts(file)
        metadata = dict(_read_metadata(file, count, lists))
        tensors = [_read_tensor_info(file) for _ in range(tensor_count)]
        # Offsets are relative to the data, which begin at the next aligned byte after the header.
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"an alignment of {alignment!r} bytes")
        data = -(-file.tell() // alignment) * alignment
        return metadata, [TensorInfo(t.name, t.shape, t.kind, data + t.offset) for t in tensors]


def read_metadata(file: IO[bytes]) -> dict[str, Any]:
    """All metadata, including the vocabulary. Raises ValueError for an invalid file."""
    _, count = _read_counts(file)
    return dict(_read_metadata(file, count, "all"))


def read_first_metadata(file: IO[bytes]) -> dict[str, Any]:
    """The metadata in the first bytes of a file: all entries that are complete. Empty for another kind of file."""
    found: dict[str, Any] = {}
    with suppress(ValueError):
        _, count = _read_counts(file)
        for name, value in _read_metadata(file, count, "short"):
            found[name] = value  # noqa: PERF403
    return found


def without_tensors(path: Path) -> bytes:
    """The header as a complete GGUF file without tensors, from which a tokenizer can be loaded."""
    with _opened(path) as file:
        _, count = _read_counts(file)
        start, spans = file.tell(), []
        for name, _ in _read_metadata(file, count, "short"):
            if not name.startswith("split."):  # else llama.cpp would look for the other parts
                spans.append((start, file.tell()))
            start = file.tell()
        file.seek(0)
        magic, version = _unpack(file, "4sI")
        chunks = [struct.pack("<4sIQQ", magic, version, 0, len(spans))]
        for start, end in spans:
            file.seek(start)
            chunks.append(_read(file, end - start))
        return b"".join(chunks)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{path} is not a readable GGUF file: {error}", code="model_unreadable") from error


def _read_counts(file: IO[bytes]) -> tuple[int, int]:
    """The numbers of tensors and of metadata entries."""
    if (magic := file.read(4)) != b"GGUF":
        raise ValueError(f"it begins with {magic!r} and not with b'GGUF'")
    version, tensors, count = _unpack(file, "IQQ")
    if version < 2:
        raise ValueError(f"GGUF version {version} is too old; version 2 and later can be read")
    if max(tensors, count) > _MAX_COUNT:
        raise ValueError(f"{tensors} tensors and {count} metadata entries")
    return tensors, count


def _read_metadata(file: IO[bytes], count: int, lists: Lists) -> Iterator[tuple[str, Any]]:
    """`_read_array` must run even for lists that are omitted: it moves to the next entry."""
    for _ in range(count):
        name = _read_string(file)
        (kind,) = _unpack(file, "I")
        if kind != _ARRAY:
            yield name, _read_scalar(file, kind)
            continue
        array = _read_array(file, whole=lists == "all")
        if lists != "none":
            yield name, array


def _read_scalar(file: IO[bytes], kind: int) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind not in _SCALARS:
        raise ValueError(f"a GGUF value of the unknown kind {kind}")
    return _unpack(file, _SCALARS[kind])[0]


def _read_array(file: IO[bytes], *, whole: bool) -> list[Any] | int:
    """The elements; unless `whole`, only the length of an array of strings or of many numbers."""
    kind, count = _unpack(file, "IQ")
    if kind != _STRING and kind not in _SCALARS:
        raise ValueError(f"a GGUF list of the unknown kind {kind}")
    if kind == _STRING:
        if count > _MAX_COUNT:
            raise ValueError(f"a list of {count} strings")
        if whole:
            return [_read_string(file) for _ in range(count)]
        for _ in range(count):
            file.seek(_read_length(file), 1)
        return int(count)
    size = struct.calcsize("<" + _SCALARS[kind])
    if count * size > _MAX_LIST:
        raise ValueError(f"a list of {count} numbers")
    if whole or count <= _MAX_SHORT:
        return list(_unpack(file, f"{count}{_SCALARS[kind]}"))
    file.seek(count * size, 1)
    return int(count)


def _read_tensor_info(file: IO[bytes]) -> TensorInfo:
    name = _read_string(file)
    (dimensions,) = _unpack(file, "I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    shape = _unpack(file, f"{dimensions}Q")
    kind, offset = _unpack(file, "IQ")
    return TensorInfo(name, tuple(reversed(shape)), kind, offset)


def _read_string(file: IO[bytes]) -> str:
    return _read(file, _read_length(file)).decode("utf-8", "replace")


def _read_length(file: IO[bytes]) -> int:
    length: int = _unpack(file, "Q")[0]
    if length > _MAX_STRING:
        raise ValueError(f"a string of {length} bytes")
    return length


def _unpack(file: IO[bytes], layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, _read(file, struct.calcsize(layout)))


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the GGUF file ends in the middle of its metadata")
    return data


# --- completeness -----------------------------------------------------------------------------------------------------


def require_complete(file: Path) -> None:
    """Raises if a part of the model ends before its last tensor begins, as after an interrupted download."""
    for part in split_parts(file):
        _, tensors = read_contents(part, lists="short")
        needed, size = max((tensor.offset for tensor in tensors), default=0), part.stat().st_size
        if needed >= max(size, 1):
            raise InvalidRequest(
                f"{part} is incomplete: it has {size} bytes, and its last tensor begins at {needed}. Download it again",
                code="model_unreadable",
            )
