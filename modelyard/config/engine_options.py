"""A model's engine: guessing it from the path, checking the engine's own fields, and what the engine is made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from modelyard import plugins
from modelyard.config.problems import ConfigPath, ProblemLevel, suggest, validation_message
from modelyard.core.engine import EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.library import model_files
from modelyard.library.model_files import leads_to_gguf
from modelyard.router.catalog import ModelEntry
from modelyard.router.settings import MODEL_KEYS, ModelSettings

ConfigFinding = tuple[ConfigPath, str, ProblemLevel]


def infer_backend(path: Any) -> str | None:
    """llama_cpp for a GGUF file, for a folder or library name that leads to one, and for a path that says GGUF though
    it is not here; ct2 for a folder of CTranslate2's."""
    if not isinstance(path, str):
        return None
    if "gguf" in path.lower() or leads_to_gguf(path):
        return "llama_cpp"
    folder = model_files.find_model_folder(path)
    return "ct2" if folder is not None and folder.kind == "ct2" else None


def engine_options(model: ModelSettings) -> BaseModel:
    """The engine's own Options. A common field that they also declare (such as path) is handed on where it is set."""
    kind: type[BaseModel] = plugins.load("engines", model.backend or "").Options
    shared = (model.model_fields_set & kind.model_fields.keys()) - {"options"}
    return kind.model_validate({name: getattr(model, name) for name in shared} | model.options)


def engine_spec(entry: ModelEntry, model: ModelSettings) -> EngineSpec:
    return EngineSpec(entry.name, engine_options(model), entry.cache_infos, entry.modalities, model.python)


def check_engine_options(models: dict[str, ModelSettings]) -> Iterator[ConfigFinding]:
    for name, model in models.items():
        if model.backend is not None:
            yield from _check_model_options(("models", name), model, model.backend)


def _check_model_options(loc: ConfigPath, model: ModelSettings, backend: str) -> Iterator[ConfigFinding]:
    build = plugins.names("engines")
    if backend not in build:
        message = f"{backend!r} is not one of the engines of this build: {', '.join(build) or 'none'}."
        yield (*loc, "backend"), message + suggest(backend, build), "unavailable"
        return
    try:
        engine_options(model)
    except plugins.MissingLibrary as error:
        yield (*loc, "backend"), error.message, "unavailable"
    except InvalidRequest as error:  # an option that names a file which the engine could not read
        yield loc, error.message, "error"
    except ValidationError as error:
        known = MODEL_KEYS | plugins.load("engines", backend).Options.model_fields.keys()
        for fault in error.errors():
            unknown = f"unknown key; neither common to all models nor {backend}'s own."
            if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
                yield (*loc, *fault["loc"]), unknown + suggest(str(fault["loc"][0]), known), "error"
            else:
                yield (*loc, *fault["loc"]), validation_message(fault), "error"
