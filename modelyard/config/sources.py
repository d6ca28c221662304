"""Sources of the configuration: files and environment variables."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel

from modelyard.config.problems import ConfigError, ConfigPath, ConfigProblem, Table, format_path, suggest
from modelyard.config.settings import FOREIGN_SECTIONS, accepted_keys, keys_by_section, type_at, without_none
from modelyard.config.source_text import json_lines, syntax_errors, toml_lines
from modelyard.router.settings import ModelSettings

# --- files ------------------------------------------------------------------------------------------------------------

SETTINGS_VARIABLE = "LLM_POOL_SETTINGS_PATH"
LOCAL_VARIABLE = "LLM_POOL_LOCAL_SETTINGS_PATH"
PROJECT_FILE = "modelyard.toml"

FileState = Literal["read", "absent", "ignored", "unused"]


class ConfigFile(Struct, frozen=True):
    """A file that is looked for. `ignored` is somebody else's file with our name, `unused` is replaced by another."""

    path: Path
    role: str  # "--config", "user", "settings", "local" or "project"
    state: FileState
    reason: str = ""  # why it is ignored or unused


def user_file(env: Mapping[str, str], platform: str = sys.platform) -> Path | None:
    """The user's own file: in $XDG_CONFIG_HOME, else in the platform's folder for settings. None without a home."""
    home = env.get("USERPROFILE") if platform == "win32" else env.get("HOME")
    if configured := env.get("XDG_CONFIG_HOME"):
        folder = Path(configured)
    elif platform == "win32" and env.get("APPDATA"):
        folder = Path(env["APPDATA"])
    elif not home:
        return None
    elif platform == "darwin":
        folder = Path(home) / "Library" / "Application Support"
    else:
        folder = Path(home) / ("AppData/Roaming" if platform == "win32" else ".config")
    return folder / "modelyard" / "modelyard.toml"


def config_files(path: Path | None, env: Mapping[str, str], cwd: Path) -> list[ConfigFile]:
    """Every file that is looked for, and what becomes of it; later ones override earlier ones.

    1. `path`, alone; or
    2. the user's file, overridden by those of the project, which are
    3. $LLM_POOL_SETTINGS_PATH or config/settings.json, overridden by $LLM_POOL_LOCAL_SETTINGS_PATH or local.json in
       the same folder; or, without these,
    4. modelyard.toml

    Only files that the user names must exist. Other programs write a config/settings.json too: it is read only if it
    looks like ours.
    """
    if path is not None:
        return [ConfigFile(cwd / path.expanduser(), "--config", "read")]
    files = []
    if (own := user_file(env)) is not None:
        files.append(ConfigFile(own, "user", "read" if own.is_file() else "absent"))
    named, local = env.get(SETTINGS_VARIABLE), env.get(LOCAL_VARIABLE)
    base = cwd / Path(named or "config/settings.json").expanduser()
    over = cwd / Path(local).expanduser() if local else base.with_name("local.json")
    settings = _found_file(base, "settings", must_exist=bool(named))
    # The overrides of our own settings are ours: a mistake in them is reported.
    ours = bool(local) or (settings.state == "read" and over.is_file())
    files += [settings, _found_file(over, "local", must_exist=ours)]
    project = cwd / PROJECT_FILE
    if not project.is_file():
        return [*files, ConfigFile(project, "project", "absent")]
    first = next((file for file in files if file.state == "read" and file.role != "user"), None)
    if first is not None:
        return [*files, ConfigFile(project, "project", "unused", f"{first.path} is used instead")]
    return [*files, ConfigFile(project, "project", "read")]


def _found_file(path: Path, role: str, *, must_exist: bool) -> ConfigFile:
    if must_exist:
        return ConfigFile(path, role, "read")
    if not path.is_file():
        return ConfigFile(path, role, "absent")
    if (reason := foreign_reason(path)) is not None:
        return ConfigFile(path, role, "ignored", reason)
    return ConfigFile(path, role, "read")


def find_files(path: Path | None, env: Mapping[str, str], cwd: Path) -> list[Path]:
    """The files to read; later ones override earlier ones."""
    return [file.path for file in config_files(path, env, cwd) if file.state == "read"]


def ignored_note(file: ConfigFile) -> str:
    return f"{file.path} is ignored: {file.reason}. --config or {SETTINGS_VARIABLE} reads it in any case."


_OUR_SECTIONS = re.compile(rb'"(engine|service|models|caches|routes)"\s*:\s*[{\[]')


def foreign_reason(path: Path) -> str | None:
    """Why this file is another program's; None for ours, including ours with mistakes. Its content decides: more of
    its sections must be ours, by name and keys, than not. A misspelt section counts for neither side."""
    try:
        table = read_file(path)
    except ConfigError:
        text = path.read_bytes() if os.access(path, os.R_OK) else b'"models": {'  # unreadable: report it
        return None if _OUR_SECTIONS.search(text) else "it has no settings of Modelyard and is not valid JSON"
    known = keys_by_section()
    ours = sum(_fits(key, value) for key, value in table.items())
    misspelt = {key for key in table if key not in known and suggest(key, known)}
    others = [key for key, value in table.items() if not _fits(key, value) and key not in {"$schema", *misspelt}]
    if ours > len(others):
        return None
    found = f", only {', '.join(map(repr, others[:3]))}{' …' if len(others) > 3 else ''}" if others else ""
    return f"it has no settings of Modelyard{found}"


def _fits(section: str, value: Any) -> bool:
    """Whether it is a section of ours that has at least one key of ours. A single value proves nothing."""
    known = keys_by_section().get(section)
    if known is None:
        return False
    kind = None if section in FOREIGN_SECTIONS else type_at((section,))
    if get_origin(kind) in (dict, list):  # models, caches, routes, keys
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        known = list(accepted_keys(without_none(get_args(kind)[-1])))
        return any(isinstance(entry, dict) and any(key in known for key in entry) for entry in entries)
    return isinstance(value, dict) and any(key in known for key in value)


def read_file(path: Path, draft: str | None = None) -> Table:
    """`draft` is read instead of the file's text. Raises ConfigError with all syntax errors."""

    def error(message: str, line: int = 0) -> ConfigError:
        return ConfigError([ConfigProblem(str(path), "", message, line=line)])

    kind = path.suffix.lower()
    if kind not in (".toml", ".json"):
        raise error("a configuration is a .toml or a .json file")
    try:
        text = path.read_text(encoding="utf-8-sig") if draft is None else draft
        table = tomllib.loads(text) if kind == ".toml" else json.loads(text, object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise error("there is no such file") from None
    except IsADirectoryError:
        raise error("is a folder, not a file") from None
    except OSError as cause:
        raise error(f"cannot be read: {cause.strerror}") from None
    except tomllib.TOMLDecodeError:
        found = syntax_errors(text)
        raise ConfigError([ConfigProblem(str(path), "", f"{reason}.", line=line) for line, reason in found]) from None
    except json.JSONDecodeError as cause:
        raise error(f"is not valid JSON: {_json_reason(cause)}.", cause.lineno) from None
    except UnicodeDecodeError as cause:
        raise error(f"is not UTF-8 text: byte {cause.start} cannot be read") from None
    except (ValueError, RecursionError) as cause:
        raise error(f"is not valid {kind[1:].upper()}: {cause}") from None
    if not isinstance(table, dict):
        raise error(f"must be a table at the top level, found {type(table).__name__}")
    return table


def _unique_keys(pairs: list[tuple[str, Any]]) -> Table:
    """JSON allows a key twice and drops the first value; that is a mistake here as in TOML."""
    found: Table = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _json_reason(error: json.JSONDecodeError) -> str:
    before = error.doc[: error.pos].rstrip()
    after = error.doc[error.pos : error.pos + 1]
    if before.endswith(",") and after in ("}", "]"):
        return f"there is a comma before the {after}"
    return error.msg[:1].lower() + error.msg[1:]


def with_lines(problems: Iterable[ConfigProblem], drafts: Mapping[Path, str] = {}) -> list[ConfigProblem]:
    """The problems with their lines in files, in the order of the lines."""
    files: dict[str, dict[str, int]] = {}
    found = []
    for problem in problems:
        if problem.source not in files:
            files[problem.source] = _lines(Path(problem.source), drafts.get(Path(problem.source)))
        lines, path = files[problem.source], problem.path
        while path and path not in lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        found.append(replace(problem, line=lines[path]) if path and not problem.line else problem)
    return sorted(found, key=lambda problem: (list(files).index(problem.source), problem.line))


def _lines(path: Path, draft: str | None = None) -> dict[str, int]:
    """Empty for sources that are not files."""
    find = {".toml": toml_lines, ".json": json_lines}.get(path.suffix.lower())
    try:
        text = draft if draft is not None or find is None else path.read_text(encoding="utf-8-sig")
        lines = find(text) if find is not None and text is not None else {}
    except (OSError, ValueError, IndexError):
        return {}
    return {format_path(setting): line for setting, line in lines.items()}


# --- environment variables --------------------------------------------------------------------------------------------
#
# `MODELYARD_HTTP_PORT`, `MODELYARD_MODELS__DEMO__N_CTX`: a name without `__` is a section and a field (or a top-level
# field); with `__` every part is a level. Lists are JSON or separated by commas, tables are JSON. Empty means not set.

PREFIX = "MODELYARD_"
ENVIRONMENT = "environment"
_NOT_SETTINGS = re.compile(r"MODELYARD_(GOLDEN|CACHE|TEMPORARY_SERVER|WORKER_.*|URL|API_KEY|ADMIN_KEY)")


# The names of the models and caches in files, by section: a variable's name cannot spell their case and punctuation.
DefinedNames = Mapping[str, Iterable[str]]


def _as_variable(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())


class EnvironmentSettings(Struct):
    """The settings of all variables, under the names that they use."""

    data: Table
    variables: dict[ConfigPath, str]
    problems: list[ConfigProblem]


def read_environment(env: Mapping[str, str], names: DefinedNames) -> EnvironmentSettings:
    found = EnvironmentSettings({}, {}, [])
    for name, value in sorted(env.items()):
        if not name.startswith(PREFIX) or _NOT_SETTINGS.fullmatch(name) or value == "":
            continue
        if (path := _variable_path(name.removeprefix(PREFIX).lower(), names)) is None:
            message = f"unknown setting.{suggest(name, _known_variables())}"
            found.problems.append(ConfigProblem(ENVIRONMENT, name, message))
        else:
            _set_value(found.data, path, _parse_value(value, _variable_type(path)))
            found.variables[path] = name
    return found


def _known_variables() -> list[str]:
    sections = keys_by_section()
    fields = [f"{section}_{key}" for section, keys in sections.items() for key in keys]
    return [PREFIX + name.upper() for name in [*fields, *sections]]


def _variable_path(name: str, names: DefinedNames) -> ConfigPath | None:
    if "__" in name:
        return _path_of_levels(tuple(name.split("__")), names)
    sections = keys_by_section()
    if name in sections:
        return (name,)
    for section, keys in sections.items():
        if name.startswith(f"{section}_") and name.removeprefix(f"{section}_") in keys:
            return section, name.removeprefix(f"{section}_")
    return None


def _path_of_levels(levels: tuple[str, ...], names: DefinedNames) -> ConfigPath | None:
    if levels[0] == "engine" and levels[1] in ("models", "decoding"):  # they have the structure of our sections
        inner = _path_of_levels(levels[1:], names)
        return ("engine", *inner) if inner else None
    if levels[0] in FOREIGN_SECTIONS:
        return levels if len(levels) == 2 and levels[1] in FOREIGN_SECTIONS[levels[0]] else None
    if levels[0] in ("models", "caches") and len(levels) > 1:
        spelled = _as_variable(levels[1])
        name = next((name for name in names[levels[0]] if _as_variable(name) == spelled), levels[1])
        levels = (levels[0], name, *levels[2:])
    for depth, key in enumerate(levels):
        kind = type_at(levels[:depth])
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if key not in accepted_keys(kind):
                # In a model: a field of its engine, which is checked with the engine's options.
                return levels if kind is ModelSettings else None
        elif get_origin(kind) is not dict:
            return None
    return levels


def _variable_type(path: ConfigPath) -> Any:
    """None if the type is not fixed: some values of foreign sections, fields of engines."""
    if path[0] in FOREIGN_SECTIONS:
        target = FOREIGN_SECTIONS[str(path[0])].get(str(path[1])) if len(path) > 1 else None
        return _variable_type((*target, *path[2:])) if target else None
    return type_at(path)


def _parse_value(value: str, kind: Any) -> Any:
    if value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # a template or other text that starts like JSON
    if get_origin(kind) is list:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _set_value(data: Table, path: ConfigPath, value: Any) -> None:
    table = data
    for key in path[:-1]:
        if not isinstance(table.get(str(key)), dict):
            table[str(key)] = {}
        table = table[str(key)]
    last = str(path[-1])
    old = table.get(last)
    table[last] = old | value if isinstance(old, dict) and isinstance(value, dict) else value


def environment_keys(env: Mapping[str, str]) -> list[Table]:
    """API keys from MODELYARD_API_KEY and MODELYARD_ADMIN_KEY. They are added to those of the files."""
    found = [("env", "MODELYARD_API_KEY", False), ("env-admin", "MODELYARD_ADMIN_KEY", True)]
    return [{"name": name, "env": variable, "admin": admin} for name, variable, admin in found if env.get(variable)]
