"""Which files hold the settings, and reading them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from msgspec import Struct, field
from pydantic import BaseModel

from modelyard.config.problems import ConfigError, ConfigPath, ConfigProblem, ProblemLevel, format_path, suggest
from modelyard.config.settings import FOREIGN_SECTIONS, accepted_keys, keys_by_section, type_at
from modelyard.router.settings import ModelSettings

# Layers of raw settings: merging them, and finding the layer that a value came from.

Table = dict[str, Any]


class ConfigLayer(Struct):
    """One source. `written` tells what its author called a value that now has our name."""

    source: str
    data: Table
    written: dict[ConfigPath, ConfigPath] = field(default_factory=dict)
    pool_models: set[str] = field(default_factory=set)  # models defined under engine.models: not enabled by default
    variables: dict[ConfigPath, str] = field(default_factory=dict)  # by the path that each variable spells
    names_model: bool = False  # it said model.model_name, which also brings that model into being

    def holds(self, loc: ConfigPath) -> bool:
        return path_exists(self.data, loc)

    def original(self, loc: ConfigPath) -> ConfigPath:
        for cut in range(len(loc), 0, -1):
            if (old := self.written.get(loc[:cut])) is not None:
                return old + loc[cut:]
        return loc

    def spell(self, loc: ConfigPath) -> str:
        """The place in its author's words: a path in a file, the name of a variable."""
        path = self.original(loc)
        cuts = (path[:cut] for cut in range(len(path), 0, -1))
        return next((self.variables[cut] for cut in cuts if cut in self.variables), format_path(path))


def path_exists(data: Any, loc: ConfigPath) -> bool:
    for key in loc:
        inside = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if key not in inside:
            return False
        data = data[key]
    return True


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Tables merge key by key; anything else, lists too, is replaced as a whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, dict):
            merged[key] = merge_tables(old if isinstance(old, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def merge_layers(layers: Iterable[ConfigLayer]) -> Table:
    merged: Table = {}
    for layer in layers:
        merged = merge_tables(merged, layer.data)
    return merged


def problem_at(
    layers: Sequence[ConfigLayer], loc: ConfigPath, message: str, level: ProblemLevel = "error"
) -> ConfigProblem:
    """A problem in the words of the layer that holds `loc`, or the nearest place above it; the last layer wins."""
    for cut in range(len(loc), 0, -1):
        for layer in reversed(layers):
            if layer.holds(loc[:cut]):
                return ConfigProblem(layer.source, layer.spell(loc), message, level)
    return ConfigProblem(layers[-1].source if layers else "", format_path(loc), message, level)


SETTINGS_VARIABLE = "LLM_POOL_SETTINGS_PATH"
LOCAL_VARIABLE = "LLM_POOL_LOCAL_SETTINGS_PATH"


def find_files(path: Path | None, env: Mapping[str, str], cwd: Path) -> list[Path]:
    """The files to read, later ones over earlier ones. Those that were named must exist; the others are looked for.

    1. `path`, alone
    2. the file that LLM_POOL_SETTINGS_PATH names, else config/settings.json; over it the one that
       LLM_POOL_LOCAL_SETTINGS_PATH names, else local.json beside it
    3. modelyard.toml
    """
    if path is not None:
        return [cwd / path.expanduser()]
    named, local = env.get(SETTINGS_VARIABLE), env.get(LOCAL_VARIABLE)
    base = cwd / Path(named or "config/settings.json").expanduser()
    over = cwd / Path(local).expanduser() if local else base.with_name("local.json")
    pool = [file for file, must in ((base, named), (over, local)) if must or file.is_file()]
    return pool or [file for file in [cwd / "modelyard.toml"] if file.is_file()]


def read_file(path: Path) -> Table:
    """The file's table, or a ConfigError that says what is wrong with it."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise _broken(path, "a configuration is a .toml or a .json file")
    try:
        table = parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise _broken(path, "there is no such file") from None
    except OSError as error:
        raise _broken(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(table, dict):
        raise _broken(path, f"must hold a table at its top, found {type(table).__name__}")
    return table


_PARSERS: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}


def _broken(path: Path, message: str) -> ConfigError:
    return ConfigError([ConfigProblem(str(path), "", message)])


# Settings from environment variables: `MODELYARD_HTTP_PORT`, `MODELYARD_MODELS__DEMO__N_CTX`.
#
# A name without `__` is a section and a field (or a top-level field); with `__` every part is a level. Lists are JSON or
# separated by commas, tables are JSON. An empty value counts as not set.

PREFIX = "MODELYARD_"
ENVIRONMENT = "environment"
_NOT_SETTINGS = re.compile(r"MODELYARD_(GOLDEN|CACHE|WORKER_.*|URL|API_KEY|ADMIN_KEY)")
_NAMED = ("models", "caches")  # tables whose keys are chosen by the user


class DefinedNames(Struct, frozen=True):
    """The models and caches that files define: a variable's name cannot spell their case and punctuation."""

    models: Iterable[str] = ()
    caches: Iterable[str] = ()

    def find(self, section: str, spelled: str) -> str:
        known = self.caches if section == "caches" else self.models
        return next((name for name in known if _plain(name) == _plain(spelled)), spelled)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())


class EnvironmentSettings(Struct):
    """What the variables say, in the names they use."""

    raw: Table
    names: dict[ConfigPath, str]
    problems: list[ConfigProblem]


def read_environment(env: Mapping[str, str], names: DefinedNames) -> EnvironmentSettings:
    found = EnvironmentSettings({}, {}, [])
    for name, value in sorted(env.items()):
        if not name.startswith(PREFIX) or _NOT_SETTINGS.fullmatch(name) or value == "":
            continue
        if (loc := _locate(name.removeprefix(PREFIX).lower(), names)) is None:
            message = f"unknown setting.{suggest(name, _known_variables())}"
            found.problems.append(ConfigProblem(ENVIRONMENT, name, message))
        else:
            _put(found.raw, loc, _decode(value, _type_at(loc)))
            found.names[loc] = name
    return found


def _known_variables() -> list[str]:
    sections = keys_by_section()
    single = [f"{section}_{key}" for section, keys in sections.items() for key in keys]
    return [PREFIX + name.upper() for name in [*single, *sections]]


def _locate(name: str, names: DefinedNames) -> ConfigPath | None:
    if "__" in name:
        return _locate_levels(tuple(name.split("__")), names)
    sections = keys_by_section()
    if name in sections:
        return (name,)
    for section, keys in sections.items():
        if name.startswith(f"{section}_") and name.removeprefix(f"{section}_") in keys:
            return section, name.removeprefix(f"{section}_")
    return None


def _locate_levels(levels: tuple[str, ...], names: DefinedNames) -> ConfigPath | None:
    if levels[0] == "engine" and levels[1] in ("models", "decoding"):
        inner = _locate_levels(levels[1:], names)  # these two are built like our own sections
        return ("engine", *inner) if inner else None
    if levels[0] in FOREIGN_SECTIONS:
        return levels if len(levels) == 2 and levels[1] in FOREIGN_SECTIONS[levels[0]] else None
    if levels[0] in _NAMED and len(levels) > 1:
        levels = (levels[0], names.find(levels[0], levels[1]), *levels[2:])
    return levels if _exists(levels) else None


def _exists(loc: ConfigPath) -> bool:
    for depth, key in enumerate(loc):
        kind = type_at(loc[:depth])
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if str(key) not in accepted_keys(kind):
                return kind is ModelSettings  # the engine's own field, checked with the engine's Options
        elif get_origin(kind) is not dict:
            return False
    return True


def _type_at(loc: ConfigPath) -> Any:
    """None for what has no fixed type: a foreign section's value, an engine's own field."""
    if loc[0] in FOREIGN_SECTIONS:
        target = FOREIGN_SECTIONS[str(loc[0])].get(str(loc[1])) if len(loc) > 1 else None
        return _type_at((*target, *loc[2:])) if target else None
    return type_at(loc)


def _decode(value: str, kind: Any) -> Any:
    if value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # a template or other text that happens to start like JSON
    if get_origin(kind) is list:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _put(raw: Table, loc: ConfigPath, value: Any) -> None:
    place = raw
    for key in loc[:-1]:
        if not isinstance(place.get(str(key)), dict):
            place[str(key)] = {}
        place = place[str(key)]
    last = str(loc[-1])
    held = place.get(last)
    place[last] = held | value if isinstance(held, dict) and isinstance(value, dict) else value


def environment_keys(env: Mapping[str, str]) -> list[Table]:
    """The keys that two variables hold themselves. They add to the files' keys, where any other list replaces."""
    found = [("env", "MODELYARD_API_KEY", False), ("env-admin", "MODELYARD_ADMIN_KEY", True)]
    return [{"name": name, "env": variable, "admin": admin} for name, variable, admin in found if env.get(variable)]
