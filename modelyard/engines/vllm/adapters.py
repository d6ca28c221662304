"""LoRA adapters by name: vLLM loads one when the first request asks for it, and knows it by a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, NotFound, Unsupported


class Adapter(Struct, frozen=True):
    """`known_as` is for vLLM alone: KV that was computed with one adapter must never be found by a later namesake."""

    name: str
    known_as: str
    number: int
    path: str


class Adapters:
    def __init__(self, configured: Mapping[str, str]) -> None:
        self.enabled = bool(configured)
        self._numbers = 0
        self._known: dict[str, Adapter] = {}
        for name, path in configured.items():
            self._add(name, path)

    def _add(self, name: str, path: str) -> Adapter:
        folder = Path(path).expanduser()
        if not (folder / "adapter_config.json").is_file():
            raise NotFound(f"the LoRA adapter {name!r} is not at {folder}: a folder with an adapter_config.json is")
        self._numbers += 1
        self._known[name] = adapter = Adapter(name, f"{name}#{self._numbers}", self._numbers, str(folder))
        return adapter

    def load(self, argument: str | None) -> None:
        """`name=folder`; one of the same name is replaced."""
        name, found, path = (argument or "").partition("=")
        if not (name and found and path):
            raise InvalidRequest("an adapter is loaded as name=folder")
        if not self.enabled:
            raise _none()
        self._add(name, path)

    def unload(self, argument: str | None) -> Adapter:
        known = self._known.pop(argument or "", None)
        if known is None:
            raise NotFound(f"there is no adapter {argument!r}; there are {', '.join(self._known) or 'none'}")
        return known

    def worn(self, asked: Sequence[tuple[str, float]]) -> Adapter | None:
        if not asked:
            return None
        if not self.enabled:
            raise _none()
        if len(asked) > 1:
            raise Unsupported("vLLM takes one adapter for a request", code="lora_unsupported")
        (name, scale), *_ = asked
        if scale != 1.0:
            raise Unsupported("vLLM takes adapters at their full strength only", code="lora_unsupported")
        if name not in self._known:
            raise NotFound(f"there is no adapter {name!r}; there are {', '.join(self._known) or 'none'}")
        return self._known[name]


def _none() -> Unsupported:
    return Unsupported(
        "the model was loaded without room for LoRA adapters: name at least one in its lora setting",
        code="lora_unsupported",
    )
