"""Loads the configuration from its sources: library < embedded default < user's file < project's files < environment <
command line.

find and read sources → convert to our names → merge → resolve defaults → validate → check
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from modelyard.config.checks import check_config
from modelyard.config.library_models import (
    EMBEDDED_SOURCE,
    LIBRARY_SOURCE,
    LibraryModel,
    default_for_any_name,
    resolve_parallel,
)
from modelyard.config.normalize import normalize_layer, resolve_defaults
from modelyard.config.problems import (
    ConfigError,
    ConfigLayer,
    ConfigPath,
    ConfigProblem,
    Table,
    errors_by_setting,
    path_exists,
    problem_at,
    suggest,
    validation_messages,
)
from modelyard.config.settings import Config, LoadedConfig, accepted_keys, type_at
from modelyard.config.sources import (
    ENVIRONMENT,
    ConfigFile,
    config_files,
    environment_keys,
    ignored_note,
    read_environment,
    read_file,
    with_lines,
)
from modelyard.http.settings import HttpSettings
from modelyard.library.default_model import DEFAULT_MODEL, is_fetched

# Used if no source defines a model and none was pulled. The model's file is fetched when the server starts.
EMBEDDED_DEFAULTS: Final[dict[str, Any]] = {
    "models": {
        "smollm2": {
            "backend": "llama_cpp",
            "path": DEFAULT_MODEL.path,
            "description": "A demo that runs anywhere; for real work: modelyard start",
        }
    },
    "caches": {
        # The same window: caches of one layout are computed together.
        "main": {"model": "smollm2", "n_ctx": 8192, "parallel": "auto", "description": "Conversations"},
        "fast": {"model": "smollm2", "n_ctx": 8192, "parallel": 2, "description": "Background tasks"},
    },
    "routes": [{"match": "*haiku*", "cache": "fast"}],
    "default_model": "smollm2",
}
ReadLibrary = Callable[[], Sequence[LibraryModel]]
COMMAND_LINE = "command line"
_VALIDATION_ROUNDS = 3  # removing an invalid value may leave its table without a required one


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    library: ReadLibrary | None = None,
    drafts: Mapping[Path, str] | None = None,
) -> LoadedConfig:
    """Load the configuration. Raises ConfigError with all errors; warnings are in the result.

    `overrides` are values of the command line under our names, such as `{"http": {"port": 9000}}`. `library` reads the
    models of the library; None: they are left out. `drafts` are texts that are read instead of those of the files.
    """
    drafts = drafts or {}
    candidates = config_files(path, env, cwd or Path.cwd())
    files = [file.path for file in candidates if file.state == "read" or file.path in drafts]
    in_library = library() if library is not None else []
    layers, problems = _read_layers(files, env, overrides or {}, in_library, drafts)
    merged: Table = {}
    for layer in layers:
        merged = merge_tables(merged, layer.data)
    problems += resolve_defaults(merged, layers)
    if added := environment_keys(env):
        keys = merged.get("keys")
        merged["keys"] = [*(keys if isinstance(keys, list) else []), *added]
    config = _validate(merged, layers, problems)
    if config is not None:
        resolve_parallel(config.models, config.caches)
        _mark(config, layers, in_library)
        findings = check_config(config, merged, env)
        problems += [problem_at(layers, loc, message, level) for loc, message, level in findings]
    problems = with_lines(dict.fromkeys(problems), drafts)
    by_name: dict[str, Path | str] = {str(file): file for file in files}
    sources = [by_name.get(layer.source, layer.source) for layer in layers]
    notes = [ignored_note(file) for file in candidates if file.state == "ignored"]
    loaded = LoadedConfig(config, sources, problems, notes, layers) if config is not None else None
    if loaded is None or any(problem.level == "error" for problem in problems):
        raise ConfigError([problem for problem in problems if problem.level in ("error", "unavailable")], loaded)
    return loaded


class ConfigSources:
    """Where a server's configuration comes from, to be read again: call it."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        library: ReadLibrary | None = None,
    ) -> None:
        self._path, self._env, self._cwd = path, env, cwd
        self._overrides, self._library = overrides, library

    def __call__(self, drafts: Mapping[Path, str] | None = None) -> LoadedConfig:
        return load_config(
            self._path,
            env=self._env,
            cwd=self._cwd,
            overrides=self._overrides,
            library=self._library,
            drafts=drafts,
        )

    def files(self) -> list[ConfigFile]:
        return config_files(self._path, self._env, self._cwd or Path.cwd())


def read_address(
    path: Path | None = None, *, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> tuple[str, int, bool]:
    """Host, port and TLS of the configured server, for its clients: other mistakes in the sources do not matter."""
    merged: Table = {}
    try:
        files = [file.path for file in config_files(path, env, cwd or Path.cwd()) if file.state == "read"]
        for layer in _read_layers(files, env, {})[0]:
            merged = merge_tables(merged, layer.data)
        http = HttpSettings.model_validate(merged.get("http") or {})
    except (ConfigError, ValidationError):
        http = HttpSettings()
    return http.host, http.port, http.ssl_certfile is not None


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Tables are merged by key; all other values, including lists, are replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_table = isinstance(value, dict)
        merged[key] = merge_tables(old if isinstance(old, dict) else {}, value) if is_table else value
    return merged


def _read_layers(
    files: list[Path],
    env: Mapping[str, str],
    overrides: Mapping[str, Any],
    in_library: Sequence[LibraryModel] = (),
    drafts: Mapping[Path, str] = {},
) -> tuple[list[ConfigLayer], list[ConfigProblem]]:
    """All sources under our names, lowest priority first. The embedded model is added if no other is defined."""
    tables = _read_files(files, drafts)
    found = [normalize_layer(str(file), table) for file, table in zip(files, tables, strict=True)]
    names = {
        key: [name for layer, _ in found if isinstance(table := layer.data.get(key), dict) for name in table]
        for key in ("models", "caches")
    }
    if not names["models"]:
        names = {key: list(EMBEDDED_DEFAULTS[key]) for key in names}
    names["models"] += [model.entry.name for model in in_library]
    environment = read_environment(env, names)
    if environment.data:
        found.append(normalize_layer(ENVIRONMENT, environment.data, environment.variables))
    if given := _without_none(overrides):
        found.append(normalize_layer(COMMAND_LINE, given))
    layers, problems = [layer for layer, _ in found], [p for _, problems in found for p in problems]
    if not _uses_library(layers):
        in_library = []
    if _needs_embedded_model(layers, [model.entry.name for model in in_library]):
        layers.insert(0, ConfigLayer(EMBEDDED_SOURCE, _embedded_defaults(layers, in_library)))
    if served := _library_tables(layers, in_library):
        layers.insert(0, ConfigLayer(LIBRARY_SOURCE, {"models": served}))
    return layers, problems + environment.problems


# --- models of the library --------------------------------------------------------------------------------------------


def _uses_library(layers: list[ConfigLayer]) -> bool:
    value = next((layer.data["library"] for layer in reversed(layers) if "library" in layer.data), True)
    try:
        return bool(TypeAdapter(bool).validate_python(value))
    except ValidationError:  # reported with the other invalid values
        return False


def _embedded_defaults(layers: list[ConfigLayer], in_library: Sequence[LibraryModel]) -> Table:
    """With a pulled model, the one that was pulled last answers to all names that no model has. The built-in one is
    then loaded on demand, if it is here."""
    default = default_for_any_name(in_library)
    if default is None or any(layer.has((key, "smollm2")) for layer in layers for key in ("models", "caches")):
        return deepcopy(EMBEDDED_DEFAULTS)
    if not is_fetched():
        return {"default_model": default}
    changed = {"routes": [], "default_model": default}
    kept = merge_tables(EMBEDDED_DEFAULTS, {"models": {"smollm2": {"enabled": False, "autoload": True}}})
    return deepcopy(kept | changed)


def _library_tables(layers: list[ConfigLayer], in_library: Sequence[LibraryModel]) -> dict[str, Table]:
    """Without models that another source defines in full, and without those whose name another source gives away."""
    taken = {name for layer in layers for name, table in _tables(layer.data.get("models")) if _defines_model(table)}
    taken |= {name for layer in layers for name, _ in _tables(layer.data.get("caches"))}
    aliases = {
        alias
        for layer in layers
        for _, table in _tables(layer.data.get("models"))
        if isinstance(table, dict)
        for alias in (table["aliases"] if isinstance(table.get("aliases"), list) else [table.get("aliases")])
    }
    return {
        model.entry.name: deepcopy(model.table)
        for model in in_library
        if model.table is not None and model.entry.name not in taken | aliases
    }


def _tables(section: Any) -> Iterable[tuple[str, Any]]:
    return section.items() if isinstance(section, dict) else ()


def _mark(config: Config, layers: list[ConfigLayer], in_library: Sequence[LibraryModel]) -> None:
    served: Table = next((layer.data["models"] for layer in layers if layer.source == LIBRARY_SOURCE), {})
    found = {model.entry.name: model for model in in_library if model.entry.name in served}
    config.mark(found, any(layer.source == EMBEDDED_SOURCE for layer in layers))


def _read_files(files: list[Path], drafts: Mapping[Path, str]) -> list[Table]:
    """Raises ConfigError with the syntax errors of all files."""
    tables, problems = list[Table](), list[ConfigProblem]()
    for file in files:
        try:
            tables.append(read_file(file, drafts.get(file)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tables


def _without_none(overrides: Mapping[str, Any]) -> Table:
    """The options that were given: omitted ones are None."""
    given = {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in overrides.items() if v is not None}
    return {k: v for k, v in given.items() if v != {}}


def _needs_embedded_model(layers: list[ConfigLayer], in_library: Sequence[str]) -> bool:
    """No file defines models, and the environment and command line change at most the embedded one. A section that
    changes a model of the library defines none."""
    if any(layer.names_model for layer in layers):
        return False
    for layer in layers:
        if (table := layer.data.get("models")) is None:
            continue
        known = {*in_library, *(EMBEDDED_DEFAULTS["models"] if layer.source in (ENVIRONMENT, COMMAND_LINE) else ())}
        if not isinstance(table, dict) or not table.keys() <= known or any(map(_defines_model, table.values())):
            return False
    return True


def _defines_model(table: Any) -> bool:
    """Whether a model's section says what to load, so that it needs no entry of the library."""
    return isinstance(table, dict) and any(table.get(key) is not None for key in ("path", "vllm_model"))


def _validate(merged: Table, layers: list[ConfigLayer], problems: list[ConfigProblem]) -> Config | None:
    """The Config. Invalid values are reported and removed, so that the checks can still run on the rest."""
    rest, reported = deepcopy(merged), set[ConfigPath]()
    for _ in range(_VALIDATION_ROUNDS):
        try:
            return Config.model_validate(rest)
        except ValidationError as error:
            for path, errors in errors_by_setting(error.errors(), rest).items():
                if path not in reported:
                    message = validation_messages(errors, secret=path[:1] == ("keys",)) + _spelling(path, errors[0])
                    problems.append(problem_at(layers, path, message))
                reported.add(path)
                _remove(rest, path, parent=errors[0]["type"] == "missing")
    return None


def _spelling(path: ConfigPath, error: ErrorDetails) -> str:
    """What may have been meant by an unknown key, or by a section of the wrong kind."""
    if error["type"] == "extra_forbidden":
        return suggest(str(path[-1]), accepted_keys(type_at(path[:-1])))
    if path in (("routes",), ("keys",)) and isinstance(error["input"], dict):
        return f" Write [[{path[0]}]] before each of them."
    if len(path) == 2 and path[0] in ("models", "caches") and not isinstance(error["input"], dict):
        return f" Settings of a {str(path[0])[:-1]} are in its own section, such as [{path[0]}.NAME]."
    return ""


def _remove(data: Any, path: ConfigPath, *, parent: bool) -> None:
    """Remove the value, or its table if a required one is missing. A list is removed whole: indexes must not shift."""
    path = path[:-1] if parent else path
    while path and (isinstance(path[-1], int) or path[-1] == "[key]"):  # pydantic's location of a dict key
        path = path[:-1]
    if path and path_exists(data, path):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]
