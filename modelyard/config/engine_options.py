"""A model's engine: its backend by path, its options, and the specification it is created from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from modelyard import plugins
from modelyard.core.engine import EngineSpec
from modelyard.library.model_files import find_model_folder, leads_to_gguf
from modelyard.router.catalog import ModelEntry
from modelyard.router.settings import ModelSettings


def infer_backend(path: Any) -> str | None:
    """llama_cpp for a GGUF file, a folder or library name with one, or a missing path that contains "gguf"; ct2 for a
    CTranslate2 folder."""
    if not isinstance(path, str):
        return None
    if "gguf" in path.lower() or leads_to_gguf(path):
        return "llama_cpp"
    folder = find_model_folder(path)
    return "ct2" if folder is not None and folder.kind == "ct2" else None


def engine_options(model: ModelSettings) -> BaseModel:
    """The engine's `Options`. Common fields that it also declares (such as path) are passed on if they are set."""
    kind: type[BaseModel] = plugins.load("engines", model.backend or "").Options
    common = (model.model_fields_set & kind.model_fields.keys()) - {"options"}
    return kind.model_validate({name: getattr(model, name) for name in common} | model.options)


def engine_spec(entry: ModelEntry, model: ModelSettings) -> EngineSpec:
    return EngineSpec(entry.name, engine_options(model), entry.cache_infos, entry.modalities, model.python)
