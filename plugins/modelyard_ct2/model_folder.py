"""A CTranslate2 model's folder: its vocabulary, its weights' names and shapes, and the memory that it will take."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.library.model_files import locate_model_folder
from modelyard_ct2.options import Ct2Options

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


# --- memory -----------------------------------------------------------------------------------------------------------

_FIXED = 140 << 20  # the library's own buffers and the texts of the tokens, as measured with a small model
_BYTES = {"int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """From the header of the model's file, before it is loaded.

    weights   the matrices in the number format of the computation, an output matrix that is that of the embeddings
              twice, and what is converted also in its old format
    KV        layers × window × parallel × keys and values of every query head: CTranslate2 copies what heads share
    compute   the attention of one layer while a prompt is read: every token to every other; for each conversation,
              since prompts that arrive together are read together

    Nothing but the weights is allocated before it is used: a model that was just loaded takes much less.
    """
    options: Ct2Options = spec.options
    variables = read_variables(find_folder(options.path))
    on_gpu = options.device != "cpu" and bool(machine.gpus)
    activation = _activation_bytes(options.compute_type, on_gpu=on_gpu)
    tokens = sum(info.window * info.parallel for info in spec.caches.values())
    # The input width of each layer's output projection is the width of all its query heads.
    query_widths = [v.shape[-1] for name, v in variables.items() if name.endswith("self_attention/linear_1/weight")]
    # The file has the number of heads as a value, not as a shape; a head is usually 64 wide.
    heads = max((width // 64 for width in query_widths), default=0)
    matrices = [v.shape[0] for name, v in variables.items() if len(v.shape) == 2 and "/layer_" in name]
    inner = 3 * max(matrices, default=0)
    scores = sum(info.parallel * info.window * (1.2 * info.window * heads + inner) for info in spec.caches.values())
    return MemoryEstimate(
        _weights_bytes(variables, options.compute_type),
        2 * activation * tokens * sum(query_widths),
        _FIXED + int(activation * scores),
        "gpu" if on_gpu else "cpu",
    )


def _weights_bytes(variables: Mapping[str, Ct2Variable], compute_type: str) -> int:
    total = 0
    for name, variable in variables.items():
        loaded = _loaded_bytes(variable, compute_type)
        is_tied = name.endswith("embeddings/weight") and not any(
            other.endswith("projection/weight") for other in variables
        )
        total += (2 if is_tied else 1) * loaded + (variable.bytes if loaded != variable.bytes else 0)
    return total


def _loaded_bytes(variable: Ct2Variable, compute_type: str) -> int:
    """Matrices are converted to the format of the computation; the rest is small."""
    size = _BYTES.get(compute_type.partition("_")[0])
    if size is None or len(variable.shape) < 2:
        return variable.bytes
    return prod(variable.shape) * size


def _activation_bytes(compute_type: str, *, on_gpu: bool) -> int:
    """Bytes per number between the matrices; plain int8 leaves the format to the device."""
    name = compute_type.rpartition("_")[2]
    if name in ("float16", "bfloat16", "float32"):
        return _BYTES[name]
    return 2 if on_gpu else 4
