"""The configuration in effect as a list of settings, each with its source and without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from modelyard.config.problems import ConfigLayer, ConfigPath
from modelyard.config.secrets import redacted
from modelyard.config.settings import LoadedConfig
from modelyard.config.sources import ENVIRONMENT

DEFAULT = "default"
DERIVED = "derived"  # from other settings, such as the backend from the path


class EffectiveSetting(Struct, frozen=True):
    """`source` is a file, `environment NAME`, `command line`, `embedded default`, `derived` or `default`."""

    path: ConfigPath
    value: Any
    source: str


def effective_settings(loaded: LoadedConfig, *, defaults: bool = False) -> Iterator[EffectiveSetting]:
    """The settings that a source gives; with `defaults` also those that none does."""
    written = loaded.config.model_dump(mode="json", exclude_unset=True)
    complete = loaded.config.model_dump(mode="json") if defaults else written
    for path, value in _leaves(complete):
        source = _source(loaded.layers, path)
        if source is None:
            source = DERIVED if _holds(written, path) else DEFAULT
        yield EffectiveSetting(path, redacted(str(path[-1]), value), source)


def _leaves(table: Mapping[str, Any], path: ConfigPath = ()) -> Iterator[tuple[ConfigPath, Any]]:
    """Lists and the tables inside a model's or a cache's fields are values. Unset values are left out."""
    depth = len(path)
    for key, value in table.items():
        if depth == 2 and key == "options" and path[0] == "models":  # an engine's fields are in the model's table
            yield from _leaves(value, path)
        elif isinstance(value, dict) and value and (depth == 0 or (depth == 1 and path[0] in ("models", "caches"))):
            yield from _leaves(value, (*path, key))
        elif value is not None and value != {}:
            yield (*path, key), value


def _source(layers: list[ConfigLayer], path: ConfigPath) -> str | None:
    for layer in reversed(layers):
        if layer.has(path):
            given = layer.describe_path(path)
            return f"{ENVIRONMENT} {given}" if layer.source == ENVIRONMENT else layer.source
    return ENVIRONMENT if path == ("keys",) else None  # a key that only the environment gives


def _holds(table: Any, path: ConfigPath) -> bool:
    for number, key in enumerate(path):
        if number == 2 and isinstance(table, dict) and key in table.get("options", {}):
            return True
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True
