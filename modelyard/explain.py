"""What people ask before anything runs: does each engine work here, and what is known of a model."""

from __future__ import annotations

from collections.abc import Iterator

from modelyard import plugins
from modelyard.config import Config, Problem
from modelyard.core.errors import ModelyardError, NotFound
from modelyard.definition import define
from modelyard.footprint import footprint, machine, sentence
from modelyard.library import shelf
from modelyard.library.describe import explain, explain_entry
from modelyard.router.catalog import ModelEntry


def broken_engines(config: Config) -> list[Problem]:
    """Every model whose engine's native library is not here or does not work on this machine."""
    return [problem for entry in config.router().catalog.models.values() for problem in _broken_engine(entry)]


def _broken_engine(entry: ModelEntry) -> Iterator[Problem]:
    if entry.backend not in plugins.names("engines"):
        return  # the configuration's own checks have said so
    try:
        plugins.verify(plugins.load("engines", entry.backend))
    except ModelyardError as error:
        yield Problem("", f"models.{entry.name}.backend", error.message, "unavailable")


def explain_model(config: Config, name: str) -> list[tuple[str, str]]:
    """What `modelyard models show` prints: of a model of the configuration, else of one in the library."""
    catalog = config.router().catalog
    entry = catalog.models.get(name) or catalog.models.get(catalog.aliases.get(name, ""))
    if entry is not None:
        settings = config.models[entry.name]
        rows = [("model", entry.name), ("engine", entry.backend), *explain(settings.path)]
        here = machine()
        rows.append(("memory", sentence(footprint(config, entry, here), here)))
        return [*rows, *define(entry, settings).notes]
    if (kept := shelf.find(name)) is not None:
        return explain_entry(kept)
    raise NotFound(f"no model {name!r}; there are {', '.join(catalog.names())}")
