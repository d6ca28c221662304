"""Writes a recommendation into the user's configuration files: only the keys that change, with a backup beside them.

TOML goes through tomlkit, which keeps comments and order. JSON text is replaced at the value and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import OutOfOrderTableProxy

from modelyard.config import sources
from modelyard.config.load import EMBEDDED_DEFAULTS, load_config
from modelyard.config.normalize import normalize_layer
from modelyard.config.problems import ConfigLayer, ConfigPath, format_path, path_exists
from modelyard.config.settings import LoadedConfig
from modelyard.core.errors import Conflict, Unavailable
from modelyard.core.knobs import Value
from modelyard.tune.tuned_model import option_aliases

KeyPath = tuple[str, ...]


def apply(
    loaded: LoadedConfig, changes: Mapping[ConfigPath, Value], backends: Mapping[str, str | None]
) -> dict[Path, Path]:
    """The changed files, each with its backup. A file is replaced only after its new text was read back."""
    files = writable_files(loaded)
    layers = [normalize_layer(str(file), sources.read_file(file))[0] for file in files]
    edits: dict[Path, dict[KeyPath, Any]] = {}
    for path, value in changes.items():
        file, key_path = _location(files, layers, path, backends)
        edits.setdefault(file, {})[key_path] = value
    if edits and not any(layer.data.get("models") for layer in layers):
        edits[files[-1]] = {**_embedded_defaults(), **edits[files[-1]]}
    return {file: _write(file, wanted) for file, wanted in edits.items()}


def writable_files(loaded: LoadedConfig) -> list[Path]:
    files = [source for source in loaded.sources if isinstance(source, Path)]
    if not files:
        raise Conflict(
            "there is no configuration file to write to: leave --apply out and save the recommendation as "
            "modelyard.toml, or name a file with --config"
        )
    return files


def overridden(path: Path | None, changes: Mapping[ConfigPath, Value], backends: Mapping[str, str | None]) -> list[str]:
    """The written values that do not take effect, because the environment has priority."""
    config = load_config(path).config.model_dump(exclude_unset=True)
    found = []
    for loc, value in changes.items():
        paths = [option_path for option_path in _alternative_paths(loc, backends) if path_exists(config, option_path)]
        if not paths or _value_at(config, paths[0]) != value:
            found.append(format_path(loc))
    return found


def _location(
    files: Sequence[Path], layers: Sequence[ConfigLayer], path: ConfigPath, backends: Mapping[str, str | None]
) -> tuple[Path, KeyPath]:
    """The file that has the key, else the one that has its section, else the last; and the path as spelled there."""
    newest_first = list(zip(files, layers, strict=True))[::-1]
    for file, layer in newest_first:
        for other in _alternative_paths(path, backends):
            if layer.has(other):
                return file, tuple(map(str, layer.original_path(other)))
    for file, layer in newest_first:
        if layer.has(path[:-1]):
            return file, tuple(map(str, layer.original_path(path)))
    return files[-1], tuple(map(str, path))


def _alternative_paths(path: ConfigPath, backends: Mapping[str, str | None]) -> list[ConfigPath]:
    """An engine's option may have another of its names in the file, or be under `options`."""
    section, name, key = path
    if section != "models":
        return [path]
    names = [str(key), *sorted(option_aliases(backends.get(str(name)), str(key)) - {str(key)})]
    return [option_path for n in names for option_path in ((section, name, n), (section, name, "options", n))]


def _embedded_defaults() -> dict[KeyPath, Any]:
    """The complete built-in model: a file that names a model replaces all of the built-in configuration."""
    flat: dict[KeyPath, Any] = {}
    for section in ("models", "caches"):
        for name, table in EMBEDDED_DEFAULTS[section].items():
            flat |= {(section, name, key): value for key, value in table.items()}
    return flat | {("routes",): EMBEDDED_DEFAULTS["routes"]}


def _write(file: Path, edits: Mapping[KeyPath, Any]) -> Path:
    text = file.read_text(encoding="utf-8-sig")
    edited = _EDITORS[file.suffix.lower()](text, edits)
    draft = file.with_name(f".{file.name}.new{file.suffix}")
    try:
        draft.write_text(edited, encoding="utf-8")
        table = sources.read_file(draft)
        for path, value in edits.items():
            if not path_exists(table, path) or _value_at(table, path) != value:
                raise Conflict(f"{format_path(path)} could not be written; the file is unchanged")
        shutil.copymode(file, draft)
        backup = _back_up(file)
        os.replace(draft, file)
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}; it is unchanged") from error
    finally:
        draft.unlink(missing_ok=True)
    return backup


def _value_at(table: Any, path: ConfigPath) -> Any:
    for key in path:
        table = table[key]
    return table


def _back_up(file: Path) -> Path:
    """Beside the file, never over another backup, and with the file's suffix: it can be loaded like the file."""
    for number in range(1000):
        backup = file.with_name(f"{file.stem}.bak{f'.{number}' if number else ''}{file.suffix}")
        if not backup.exists():
            shutil.copy2(file, backup)
            return backup
    raise Conflict(f"{file} has a thousand backups: remove some")


# --- TOML -------------------------------------------------------------------------------------------------------------


def edit_toml(text: str, changes: Mapping[KeyPath, Any]) -> str:
    document = tomlkit.parse(text)
    for path, value in changes.items():
        table: Any = document
        for depth, key in enumerate(path[:-1]):
            if key not in table:  # the outermost table needs no header, only its parts do
                table[key] = tomlkit.table(is_super_table=depth == 0)
            table = table[key]
            if not isinstance(table, MutableMapping | OutOfOrderTableProxy):
                raise Conflict(f"{'.'.join(path[: depth + 1])} is not a section: {key} has a value")
        table[path[-1]] = value
    return tomlkit.dumps(document)


def toml_fragment(changes: Mapping[KeyPath, Any]) -> str:
    return edit_toml("", changes).strip()


# --- JSON -------------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


def edit_json(text: str, changes: Mapping[KeyPath, Any]) -> str:
    for path, value in changes.items():
        text = _set_json(text, path, value)
    return text


def _set_json(text: str, path: KeyPath, value: Value) -> str:
    at = _skip_space(text, 0)
    for depth, key in enumerate(path):
        if text[at] != "{":
            raise Conflict(f"{'.'.join(path[:depth])} is not an object")
        members = _members(text, at)
        if key not in members:
            nested: Any = value
            for inner in reversed(path[depth + 1 :]):
                nested = {inner: nested}
            return _insert_member(text, at, members, key, nested)
        at = members[key][0]
    return text[:at] + json.dumps(value, ensure_ascii=False) + text[members[key][1] :]


def _members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """The start and end of each value of the object that begins at `at`."""
    found: dict[str, tuple[int, int]] = {}
    at = _skip_space(text, at + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)  # after the colon
        _, end = _decoder.raw_decode(text, start)
        found[key] = (start, end)
        at = _skip_space(text, end)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return found


def _insert_member(text: str, at: int, members: Mapping[str, tuple[int, int]], key: str, value: Any) -> str:
    """After the last member, on a line of its own if that one has one."""
    member = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
    if not members:
        return text[: at + 1] + member + text[_skip_space(text, at + 1) :]
    start, end = list(members.values())[-1]
    line = text[text.rfind("\n", 0, start) + 1 : start]
    has_own_line = "\n" in text[at:start] and line.lstrip().startswith('"')
    separator = ",\n" + line[: len(line) - len(line.lstrip())] if has_own_line else ", "
    return text[:end] + separator + member + text[end:]


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


_EDITORS = {".toml": edit_toml, ".json": edit_json}
