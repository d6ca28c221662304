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

from modelyard.config import environment, sources
from modelyard.config.backends import check_options
from modelyard.config.checks import check
from modelyard.config.faults import sentence
from modelyard.config.layers import Layer, Table, merge_all, problem_at, reaches
from modelyard.config.names import adopt, settle
from modelyard.config.problems import ConfigError, Loc, Problem, suggest
from modelyard.config.root import EMBEDDED, Config
from modelyard.config.shape import at, keys_of

EMBEDDED_SOURCE = "embedded default"
COMMAND_LINE = "command line"
_ROUNDS = 3  # taking out a bad value may leave its table without a value that it needs


class Loaded(Struct):
    """A usable configuration, the sources it came from (lowest first), and what its owner should know."""

    config: Config
    source: list[Path | str]
    problems: list[Problem]


def load(
    path: Path | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """The configuration in force. Raises ConfigError with every error; lesser problems come with the result.

    `overrides` are the command line's values in our own names, such as `{"http": {"port": 9000}}`.
    """
    files = sources.find(path, env, cwd or Path.cwd())
    layers, problems = _layers(files, env, overrides or {})
    merged = merge_all(layers)
    problems += settle(merged, layers)
    if added := environment.keys(env):
        merged["keys"] = [*_listed(merged.get("keys")), *added]
    config = _validate(merged, layers, problems)
    if config is not None:
        _check(config, merged, layers, env, problems)
    problems = list(dict.fromkeys(problems))
    errors = [problem for problem in problems if problem.level == "error"]
    if config is None or errors:
        raise ConfigError(errors)
    by_name: dict[str, Path | str] = {str(file): file for file in files}
    return Loaded(config, [by_name.get(layer.source, layer.source) for layer in layers], problems)


def _listed(keys: Any) -> list[Any]:
    return keys if isinstance(keys, list) else []


def _layers(
    files: list[Path], env: Mapping[str, str], overrides: Mapping[str, Any]
) -> tuple[list[Layer], list[Problem]]:
    """Every source under our names, lowest first. The embedded model is there only where nobody defines another."""
    pairs = [adopt(str(file), sources.read(file)) for file in files]
    names = {key: [n for layer, _ in pairs for n in _table(layer, key)] for key in ("models", "caches")}
    if not names["models"]:
        names = {key: list(EMBEDDED[key]) for key in names}
    variables = environment.read(env, environment.Names(**names))
    for source, raw in ((environment.SOURCE, variables.raw), (COMMAND_LINE, _given(overrides))):
        if raw:
            pairs.append(adopt(source, raw, variables.names if source == environment.SOURCE else {}))
    layers, problems = [layer for layer, _ in pairs], [p for _, found in pairs for p in found]
    if _needs_embedded(layers):
        layers.insert(0, Layer(EMBEDDED_SOURCE, deepcopy(EMBEDDED)))
    return layers, problems + variables.problems


def _table(layer: Layer, key: str) -> Table:
    table = layer.data.get(key)
    return table if isinstance(table, dict) else {}


def _given(overrides: Mapping[str, Any]) -> Table:
    """What was really said on the command line: options left out come as None."""
    told = {k: _given(v) if isinstance(v, Mapping) else v for k, v in overrides.items() if v is not None}
    return {k: v for k, v in told.items() if v != {}}


def _needs_embedded(layers: list[Layer]) -> bool:
    if any(layer.names_model for layer in layers):
        return False
    tables = [layer.data.get("models") for layer in layers if layer.data.get("models") is not None]
    over = {environment.SOURCE, COMMAND_LINE}
    files = any(layer.data.get("models") is not None for layer in layers if layer.source not in over)
    return not files and all(isinstance(t, dict) and t.keys() <= EMBEDDED["models"].keys() for t in tables)


def _validate(merged: Table, layers: list[Layer], problems: list[Problem]) -> Config | None:
    """The Config; with faults, the Config of what is left without them, so that later checks still find theirs."""
    left, told = deepcopy(merged), set[Loc]()
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


def _problem(fault: ErrorDetails, layers: list[Layer]) -> Problem:
    loc = fault["loc"]
    message = sentence(fault, secret=loc[:1] == ("keys",))
    if fault["type"] == "extra_forbidden":
        message += suggest(str(loc[-1]), keys_of(at(loc[:-1])))
    return problem_at(layers, loc, message)


def _drop(data: Any, loc: Loc, *, whole: bool) -> None:
    """Take out what is at fault, or its table where something is missing. A list goes as a whole: numbers must hold."""
    path = loc[:-1] if whole else loc
    while path and (isinstance(path[-1], int) or path[-1] == "[key]"):  # pydantic's word for «the key itself»
        path = path[:-1]
    if path and reaches(data, path):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]


def _check(config: Config, merged: Table, layers: list[Layer], env: Mapping[str, str], problems: list[Problem]) -> None:
    models, caches = (table if isinstance(table := merged.get(key), dict) else {} for key in ("models", "caches"))
    findings = [*check_options(config.models), *check(config, models, caches, env)]
    problems += [problem_at(layers, loc, message, level) for loc, message, level in findings]
