"""LoRA adapters, loaded beside the weights and applied to a context when its jobs use them; and control vectors.

A context has one set of adapters at a time, so the jobs of a cache take turns by their set (`batch.next_in_turn`). KV
that was computed with one set is never used with another (`sequences.py`).

A control vector is a direction per layer that is added to what the layer computes, for all answers of a model. A GGUF
file has a tensor `direction.N` of 32-bit floats for each layer N from 1 on, as llama.cpp's cvector-generator and the
package repeng write it. Several files are added up, each with its scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ctypes import POINTER, c_float, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.errors import Conflict, InvalidRequest
from modelyard.engines.llama_cpp import file_check
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.kv_snapshot import AdapterVersions, file_identity
from modelyard.engines.llama_cpp.options import Lora, Options
from modelyard.engines.llama_cpp.sequences import AdapterSet
from modelyard.library.gguf import TensorInfo, read_contents
from modelyard.library.model_files import locate_model_file
from modelyard.tokenizer import llama_log


class _Adapter(Struct, frozen=True):
    raw: Any
    scale: float
    path: Path


class LoraAdapters:
    """All adapters of one model. Belongs to the engine's thread, like the contexts that use them."""

    def __init__(self, model: Any, path: Path, configured: Mapping[str, Lora]) -> None:
        self._model, self._model_path = model, path
        self._adapters: dict[str, _Adapter] = {}
        for name, lora in configured.items():
            self.load(name, lora)

    def load(self, name: str, lora: Lora) -> None:
        if name in self._adapters:
            raise Conflict(f"the adapter {name!r} exists already; unload it first")
        path = locate_model_file(lora.path)
        file_check.check_adapter(name, path, self._model_path)
        llama_log.clear()
        raw = lib.llama_adapter_lora_init(self._model, str(path).encode())
        if not raw:
            raise InvalidRequest(
                f"the adapter {name!r} in {path} cannot be loaded: {llama_log.first_error()}", code="adapter_unreadable"
            )
        self._adapters[name] = _Adapter(raw, lora.scale, path)

    def scales(self) -> tuple[tuple[str, float], ...]:
        """The name and the scale of each; may be called on any thread."""
        return tuple((name, adapter.scale) for name, adapter in list(self._adapters.items()))

    def unload(self, name: str) -> None:
        """No context may use it any more."""
        self.check(((name, 1.0),))
        lib.llama_adapter_lora_free(self._adapters.pop(name).raw)

    def check(self, adapters: AdapterSet) -> None:
        for name, _ in adapters:
            if name not in self._adapters:
                names = ", ".join(map(repr, self._adapters))
                known = f"use one of {names}" if names else "this model has none"
                raise InvalidRequest(f"unknown adapter {name!r}; {known}", code="adapter_unknown", param="lora_adapter")

    def versions(self, adapters: AdapterSet) -> AdapterVersions:
        """What KV that was computed with them depends on: their effective scales and the identity of their files."""
        return tuple(
            (name, held.scale * scale, file_identity([held.path]))
            if (held := self._adapters.get(name)) is not None
            else (name, scale, "gone")
            for name, scale in adapters
        )

    def apply(self, context: Any, adapters: AdapterSet) -> None:
        """Replaces the context's set. A request's scale is multiplied with the adapter's own."""
        count = len(adapters)
        held = [self._adapters[name] for name, _ in adapters]
        raws = (c_void_p * count)(*(each.raw for each in held))
        scales = (c_float * count)(*(each.scale * scale for each, (_, scale) in zip(held, adapters, strict=True)))
        lib.llama_set_adapters_lora(context, raws, count, scales)


def parse_adapter_argument(argument: str | None) -> tuple[str, Lora]:
    """`name=path`, the argument of `load_adapter`."""
    name, equals, path = (argument or "").partition("=")
    if not (name and equals and path):
        raise InvalidRequest(f"load_adapter takes name=path, not {argument!r}", code="invalid_argument")
    return name, Lora(path=path)


Directions = npt.NDArray[np.float32]  # a row per layer, from layer 1 on

_NAME = re.compile(r"direction\.([1-9]\d{0,4})")
_F32 = 0  # ggml's number of the type


# --- control vectors --------------------------------------------------------------------------------------------------


class ControlVectors(Struct, frozen=True):
    """The sum of a model's files. `layers` are the first and the last to which it is added."""

    directions: Directions
    layers: tuple[int, int]

    def apply(self, context: Any) -> None:
        data = np.ascontiguousarray(self.directions)
        pointer = data.ctypes.data_as(POINTER(c_float))  # llama.cpp copies it
        if lib.llama_set_adapter_cvec(context, pointer, data.size, data.shape[1], *self.layers) != 0:
            raise InvalidRequest("llama.cpp does not take the control vectors", code="control_vector_unusable")


def load_control_vectors(options: Options, model: Any) -> ControlVectors | None:
    """None if there are none. Raises if a file is not one of control vectors, or not for this model."""
    if not options.control_vectors:
        return None
    width, layers = lib.llama_model_n_embd(model), lib.llama_model_n_layer(model)
    total = np.zeros((layers, width), np.float32)
    for each in options.control_vectors:
        path = locate_model_file(each.path)
        directions = read_directions(path)
        if directions.shape[1] != width or len(directions) > layers:
            raise _unusable(
                path,
                f"it is for {directions.shape[1]} numbers in {len(directions)} layers, and the model has {width} in "
                f"{layers}",
            )
        total[: len(directions)] += np.float32(each.scale) * directions
    first, last = options.control_vector_layers or (1, layers)
    return ControlVectors(total, (first, min(last, layers)))


def read_directions(path: Path) -> Directions:
    """All layers of one file; those that it lacks are zero."""
    try:
        _, tensors = read_contents(path)
    except (OSError, ValueError, TypeError, InvalidRequest) as error:
        raise _unusable(path, f"it is not a GGUF file: {error}") from error
    if not tensors:
        raise _unusable(path, "it has no directions")
    rows = {_layer(path, tensor): tensor for tensor in tensors}
    if len(widths := {tensor.shape[0] for tensor in tensors}) > 1:
        raise _unusable(path, f"its directions have different lengths: {sorted(widths)}")
    (width,) = widths
    found = np.zeros((max(rows), width), np.float32)
    for layer, tensor in rows.items():
        data = np.fromfile(path, "<f4", width, offset=tensor.offset)
        if len(data) < width:
            raise _unusable(path, f"it ends inside {tensor.name}")
        found[layer - 1] = data
    return found


def control_vectors_identity(options: Options) -> list[Any]:
    """What KV that was computed with them depends on."""
    files = [(file_identity([locate_model_file(each.path)]), each.scale) for each in options.control_vectors]
    return [*files, options.control_vector_layers] if files else []


def _layer(path: Path, tensor: TensorInfo) -> int:
    name = _NAME.fullmatch(tensor.name)
    if name is None or len(tensor.shape) != 1 or tensor.kind != _F32:
        raise _unusable(path, f"{tensor.name!r} is not a direction of a layer: direction.N, one row of 32-bit floats")
    return int(name[1])


def _unusable(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be a control vector of this model: {reason}", code="control_vector_unusable")
