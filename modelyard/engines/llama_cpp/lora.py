"""LoRA adapters by name: loaded beside the weights, put on a context when the jobs of a step ask for them.

A context wears one set of adapters at a time, so the jobs of a cache take turns by their set (`step.turn`); KV that was
computed under one set is never used under another (`sequences`).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, c_float, c_void_p
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.errors import Conflict, InvalidRequest
from modelyard.engines.llama_cpp import files
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.kv_snapshot import AdapterVersions, file_identity
from modelyard.engines.llama_cpp.options import Lora
from modelyard.engines.llama_cpp.sequences import AdapterSet
from modelyard.tokenizer import llama_log


class _Held(Struct, frozen=True):
    raw: Any
    scale: float
    path: Path


class LoraAdapters:
    """All adapters of one model. Belongs to the engine's thread, as the contexts that wear them do."""

    def __init__(self, model: Any, known: Mapping[str, Lora]) -> None:
        self._model = model
        self._held: dict[str, _Held] = {}
        for name, lora in known.items():
            self.load(name, lora)

    def load(self, name: str, lora: Lora) -> None:
        if name in self._held:
            raise Conflict(f"there is an adapter {name!r} already; unload it first")
        path = files.find(lora.path)
        llama_log.forget()
        raw = lib.llama_adapter_lora_init(self._model, str(path).encode())
        if not raw:
            raise InvalidRequest(
                f"the adapter {name!r} in {path} cannot be loaded: {llama_log.reason()}", code="adapter_unreadable"
            )
        self._held[name] = _Held(raw, lora.scale, path)

    def unload(self, name: str) -> None:
        """No context may wear it any more."""
        self.check(((name, 1.0),))
        lib.llama_adapter_lora_free(self._held.pop(name).raw)

    def check(self, asked: AdapterSet) -> None:
        for name, _ in asked:
            if name not in self._held:
                known = f"there are {', '.join(map(repr, self._held))}" if self._held else "this model has none"
                raise InvalidRequest(
                    f"there is no adapter {name!r}; {known}", code="adapter_unknown", param="lora_adapter"
                )

    def worn(self, asked: AdapterSet) -> AdapterVersions:
        """What KV that was computed under them is bound to: their strengths in effect, and which files they are."""
        return tuple(self._worn(name, scale) for name, scale in asked)

    def _worn(self, name: str, scale: float) -> tuple[str, float, str]:
        held = self._held.get(name)
        return (name, held.scale * scale, file_identity([held.path])) if held is not None else (name, scale, "gone")

    def put_on(self, context: Any, asked: AdapterSet) -> None:
        """Exactly these, at the request's scale times the adapter's own."""
        count = len(asked)
        held = [self._held[name] for name, _ in asked]
        raws = (POINTER(c_void_p) * count)(*(one.raw for one in held))
        scales = (c_float * count)(*(one.scale * scale for one, (_, scale) in zip(held, asked, strict=True)))
        lib.llama_set_adapters_lora(context, raws, count, scales)


def parse_adapter_argument(argument: str | None) -> tuple[str, Lora]:
    """`name=path`, as `load_adapter` is told it."""
    name, equals, path = (argument or "").partition("=")
    if not (name and equals and path):
        raise InvalidRequest(f"load_adapter takes name=path, not {argument!r}", code="invalid_argument")
    return name, Lora(path=path)
