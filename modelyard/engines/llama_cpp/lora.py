"""LoRA adapters by name: loaded beside the weights, applied to a context when the jobs of a step use them.

A context has one set of adapters at a time, so the jobs of a cache take turns by their set (`batch.next_adapters`). KV
that was computed with one set is never used with another (`sequences.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_float, c_void_p
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.errors import Conflict, InvalidRequest
from modelyard.engines.llama_cpp import file_check
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.kv_snapshot import AdapterVersions, file_identity
from modelyard.engines.llama_cpp.options import Lora
from modelyard.engines.llama_cpp.sequences import AdapterSet
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
