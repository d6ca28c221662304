"""Loads the configuration: default below files, files below environment, environment below the command line.

find and read files → our names → merge → settle → validate → check across sections
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from msgspec import Struct
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from modelyard.config import sources
from modelyard.config import sources as environment
from modelyard.config.checks import check_config
from modelyard.config.engine_options import check_engine_options
from modelyard.config.normalize import normalize_layer, resolve_defaults
from modelyard.config.problems import ConfigError, ConfigPath, ConfigProblem, suggest, validation_message
from modelyard.config.settings import EMBEDDED_DEFAULTS, Config, accepted_keys, type_at
from modelyard.config.sources import ConfigLayer, Table, merge_layers, path_exists, problem_at

EMBEDDED_SOURCE = "embedded default"
COMMAND_LINE = "command line"
_ROUNDS = 3  # taking out a bad value may leave its table without a value that it needs


class LoadedConfig(Struct):
    """A usable configuration, the sources it came from (lowest first), and what its owner should know."""

    config: Config
    source: list[Path | str]
    problems: list[ConfigProblem]


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """The configuration in force. Raises ConfigError with every error; lesser problems come with the result.

    `overrides` are the command line's values in our own names, such as `{"http": {"port": 9000}}`.
    """
    files = sources.find_files(path, env, cwd or Path.cwd())
    layers, problems = _layers(files, env, overrides or {})
    merged = merge_layers(layers)
    problems += resolve_defaults(merged, layers)
    if added := environment.environment_keys(env):
        merged["keys"] = [*_listed(merged.get("keys")), *added]
    config = _validate(merged, layers, problems)
    if config is not None:
        _check(config, merged, layers, env, problems)
    problems = list(dict.fromkeys(problems))
    errors = [problem for problem in problems if problem.level == "error"]
    if config is None or errors:
        raise ConfigError(errors)
    by_name: dict[str, Path | str] = {str(file): file for file in files}
    return LoadedConfig(config, [by_name.get(layer.source, layer.source) for layer in layers], problems)


def _listed(keys: Any) -> list[Any]:
    return keys if isinstance(keys, list) else []


def _layers(
    files: list[Path], env: Mapping[str, str], overrides: Mapping[str, Any]
) -> tuple[list[ConfigLayer], list[ConfigProblem]]:
    """Every source under our names, lowest first. The embedded model is there only where nobody defines another."""
    pairs = [normalize_layer(str(file), sources.read_file(file)) for file in files]
    names = {key: [n for layer, _ in pairs for n in _table(layer, key)] for key in ("models", "caches")}
    if not names["models"]:
        names = {key: list(EMBEDDED_DEFAULTS[key]) for key in names}
    variables = environment.read_environment(env, environment.DefinedNames(**names))
    for source, raw in ((environment.ENVIRONMENT, variables.raw), (COMMAND_LINE, _given(overrides))):
        if raw:
            pairs.append(normalize_layer(source, raw, variables.names if source == environment.ENVIRONMENT else {}))
    layers, problems = [layer for layer, _ in pairs], [p for _, found in pairs for p in found]
    if _needs_embedded(layers):
        layers.insert(0, ConfigLayer(EMBEDDED_SOURCE, deepcopy(EMBEDDED_DEFAULTS)))
    return layers, problems + variables.problems


def _table(layer: ConfigLayer, key: str) -> Table:
    table = layer.data.get(key)
    return table if isinstance(table, dict) else {}


def _given(overrides: Mapping[str, Any]) -> Table:
    """What was really said on the command line: options left out come as None."""
    told = {k: _given(v) if isinstance(v, Mapping) else v for k, v in overrides.items() if v is not None}
    return {k: v for k, v in told.items() if v != {}}


def _needs_embedded(layers: list[ConfigLayer]) -> bool:
    if any(layer.names_model for layer in layers):
        return False
    tables = [layer.data.get("models") for layer in layers if layer.data.get("models") is not None]
    over = {environment.ENVIRONMENT, COMMAND_LINE}
    files = any(layer.data.get("models") is not None for layer in layers if layer.source not in over)
    return not files and all(isinstance(t, dict) and t.keys() <= EMBEDDED_DEFAULTS["models"].keys() for t in tables)


def _validate(merged: Table, layers: list[ConfigLayer], problems: list[ConfigProblem]) -> Config | None:
    """The Config; with faults, the Config of what is left without them, so that later checks still find theirs."""
    left, told = deepcopy(merged), set[ConfigPath]()
    for _ in range(_ROUNDS):
        try:
            return Config.model_validate(left)
        except ValidationError as error:
            faults = [fault for fault in error.errors() if fault["loc"] not in told]
            problems += [_problem(fault, layers) for fault in faults]
            told.update(fault["loc"] for fault in faults)
            for fault in error.errors():
                _drop(left, fault["loc"], whole=fault["type"] == "missing")
    return None


def _problem(fault: ErrorDetails, layers: list[ConfigLayer]) -> ConfigProblem:
    loc = fault["loc"]
    message = validation_message(fault, secret=loc[:1] == ("keys",))
    if fault["type"] == "extra_forbidden":
        message += suggest(str(loc[-1]), accepted_keys(type_at(loc[:-1])))
    return problem_at(layers, loc, message)


def _drop(data: Any, loc: ConfigPath, *, whole: bool) -> None:
    """Take out what is at fault, or its table where something is missing. A list goes as a whole: numbers must hold."""
    path = loc[:-1] if whole else loc
    while path and (isinstance(path[-1], int) or path[-1] == "[key]"):  # pydantic's word for «the key itself»
        path = path[:-1]
    if path and path_exists(data, path):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]


def _check(
    config: Config, merged: Table, layers: list[ConfigLayer], env: Mapping[str, str], problems: list[ConfigProblem]
) -> None:
    models, caches = (table if isinstance(table := merged.get(key), dict) else {} for key in ("models", "caches"))
    findings = [*check_engine_options(config.models), *check_config(config, models, caches, env)]
    problems += [problem_at(layers, loc, message, level) for loc, message, level in findings]
