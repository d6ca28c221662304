"""What people ask before anything runs: does each engine work here, and what is known of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from modelyard import plugins
from modelyard.config.problems import ConfigProblem
from modelyard.config.settings import Config
from modelyard.core.errors import ModelyardError, NotFound
from modelyard.library import models
from modelyard.library.models import describe_entry, describe_file
from modelyard.router.catalog import ModelEntry
from modelyard.server.memory_estimate import available_memory, describe_memory, estimate_memory
from modelyard.server.model_definition import define_model
from modelyard.workers import interpreter


def broken_engines(config: Config) -> list[ConfigProblem]:
    """Every model whose engine's native library is not here or does not work on this machine."""
    entries = config.router().catalog.models.values()
    return [problem for entry in entries for problem in _broken_engine(entry, config.models[entry.name].python)]


def _broken_engine(entry: ModelEntry, python: str | None) -> Iterator[ConfigProblem]:
    """One that runs by another interpreter need not work here; that one must be fit to run it."""
    if entry.backend not in plugins.names("engines"):
        return  # the configuration's own checks have said so
    try:
        if python is not None:
            if interpreter.interpreter_exists(python):  # else the configuration's own checks have said so
                asyncio.run(interpreter.check_interpreter(python))
        else:
            plugins.verify(plugins.load("engines", entry.backend))
    except ModelyardError as error:
        field = "backend" if python is None else "python"
        yield ConfigProblem("", f"models.{entry.name}.{field}", error.message, "unavailable")


def explain_model(config: Config, name: str) -> list[tuple[str, str]]:
    """What `modelyard models show` prints: of a model of the configuration, else of one in the library."""
    catalog = config.router().catalog
    entry = catalog.models.get(name) or catalog.models.get(catalog.aliases.get(name, ""))
    if entry is not None:
        settings = config.models[entry.name]
        rows = [("model", entry.name), ("engine", entry.backend), *describe_file(settings.path)]
        here = available_memory()
        rows.append(("memory", describe_memory(estimate_memory(config, entry, here), here)))
        return [*rows, *define_model(entry, settings).notes]
    if (kept := models.find_model(name)) is not None:
        return describe_entry(kept)
    raise NotFound(f"no model {name!r}; there are {', '.join(catalog.names())}")
