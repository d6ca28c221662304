"""Sources of the configuration: files and environment variables.

Parsers report neither all syntax errors nor the lines of values, so both are found in the text of a file.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel

from modelyard.config.problems import ConfigError, ConfigPath, ConfigProblem, Table, format_path, suggest
from modelyard.config.settings import FOREIGN_SECTIONS, accepted_keys, keys_by_section, type_at, without_none
from modelyard.router.settings import ModelSettings

# --- TOML -------------------------------------------------------------------------------------------------------------


class TomlStatement(Struct, frozen=True):
    """A header or a key with its value, which may span the lines from `line` to `end`, counted from 1. `path` is the
    section, or the section and the key; `table` is what the statement says by itself."""

    line: int
    end: int
    path: ConfigPath
    is_header: bool
    table: Table


def toml_statements(text: str) -> Iterator[TomlStatement]:
    """The statements of a valid text. An entry of a list of sections, `[[routes]]`, has its number in the path."""
    entries: dict[ConfigPath, int] = {}  # how many [[…]] a path has had
    section: ConfigPath = ()
    for line, statement, table in _statements(text):
        end = line + statement.rstrip("\n").count("\n")
        if not statement.lstrip().startswith("["):
            yield TomlStatement(line, end, (*section, next(iter(table))), False, table)
            continue
        section = ()
        keys = [*_header_keys(table)]
        for depth, key in enumerate(keys, 1):
            section = (*section, key)
            if depth == len(keys) and statement.lstrip().startswith("[["):
                entries[section] = entries.get(section, 0) + 1
            if section in entries:
                section = (*section, entries[section] - 1)
        yield TomlStatement(line, end, section, True, table)


def toml_lines(text: str) -> dict[ConfigPath, int]:
    """The line of each section and key of a valid text; lines are counted from 1."""
    found: dict[ConfigPath, int] = {}
    for statement in toml_statements(text):
        path = statement.path
        if statement.is_header:
            for length in range(1, len(path) + 1):
                found.setdefault(path[:length], statement.line)
        else:
            for inner in _paths(statement.table):
                found.setdefault((*path[:-1], *inner), statement.line)
    return found


def _statements(text: str) -> Iterator[tuple[int, str, Table]]:
    """Each header or key with its value, which may span lines: its first line, its text and what it says."""
    start, statement = 1, ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        statement += line
        try:
            table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # it goes on in the next line
        if table:
            yield start, statement, table
        start, statement = number + 1, ""


def _header_keys(table: Any) -> Iterator[str]:
    while isinstance(table, list | dict) and table:
        if isinstance(table, list):
            table = table[0]
        else:
            ((key, table),) = table.items()
            yield key


def _paths(value: Any) -> Iterator[ConfigPath]:
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (key,)
        yield from ((key, *path) for path in _paths(inner))


# --- JSON -------------------------------------------------------------------------------------------------------------

_JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]|[^\s{}\[\],:"]+')


def json_lines(text: str) -> dict[ConfigPath, int]:
    """The line of each key and element of a valid text."""
    found: dict[ConfigPath, int] = {}
    path: list[str | int] = []  # of the value that comes next
    line, is_key = 1, False
    for word in _JSON_WORD.findall(text):
        if word == "\n":
            line += 1
        elif word in "}]":
            path.pop()
            is_key = False
        elif word == ",":
            last = path[-1]
            is_key = isinstance(last, str)
            path[-1] = last + 1 if isinstance(last, int) else last
        elif is_key:
            path[-1] = json.loads(word)
            found.setdefault(tuple(path), line)
            is_key = False
        elif word != ":":  # a value
            if path and isinstance(path[-1], int):
                found.setdefault(tuple(path), line)
            if word in "{[":
                path.append("" if word == "{" else 0)
                is_key = word == "{"
    return found


# --- syntax errors of TOML --------------------------------------------------------------------------------------------

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_MAX_ERRORS = 20
# the beginning of the parser's message → what its author did; others are quoted
_MEANINGS = (
    ("Illegal character '\\n'", "a text is not closed: its last quote is missing"),
    ("Unterminated string", "a text is not closed: its last quotes are missing"),
    ("Cannot overwrite a value", "the key is given twice in one section"),
    ("Cannot declare", "the section is given twice, or its name is that of a key"),
    ("Expected '=' after a key", "a setting is written as key = value"),
    ("Invalid initial character for a key", "a key has letters, digits, - and _; others need quotes"),
    ("Invalid value", "there is no valid value: texts need quotes; true and false are written in lower case"),
    ("Unescaped '\\'", "a backslash in a text is written twice; between single quotes once is enough"),
    ("Invalid hex value", "a backslash in a text is written twice; between single quotes once is enough"),
    ("Unclosed array", "a list is not closed, or a comma is missing in it"),
    ("Unclosed inline table", "a table in braces is not closed, or a comma is missing in it"),
    ("Expected newline or end of document", "a value is followed by more than a comment: texts need quotes"),
)
_GOES_ON = ("Unclosed", "Unterminated")  # the line where it begins is unknown: what follows may be part of it


def syntax_errors(text: str) -> list[tuple[int, str]]:
    """All lines that are not valid TOML, with a reason; empty if the text is valid. The parser stops at its first
    error, so each faulty line is taken out and the rest is parsed again."""
    lines = text.splitlines()
    found: list[tuple[int, str]] = []
    while len(found) < _MAX_ERRORS:
        try:
            tomllib.loads("\n".join(lines))
            break
        except tomllib.TOMLDecodeError as error:
            message = str(error)
        position = _POSITION.search(message)
        line = int(position[1]) if position and position[1] else len(lines)
        reason = message[: position.start()] if position else message
        meaning = next((meaning for start, meaning in _MEANINGS if reason.startswith(start)), None)
        if found and line <= found[-1][0]:
            break
        found.append((line, meaning or reason[:1].lower() + reason[1:]))
        if reason.startswith(_GOES_ON):
            break
        lines[line - 1] = ""
    return found


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
_NOT_SETTINGS = re.compile(r"MODELYARD_(GOLDEN|CACHE|KV_STORE|TEMPORARY_SERVER|WORKER_.*|URL|API_KEY|ADMIN_KEY)")


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
