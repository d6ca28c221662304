"""A recommendation written into the file it belongs in: a backup beside it, and nothing that would not load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.config import sources
from modelyard.config.load import EMBEDDED_DEFAULTS, load_config
from modelyard.config.normalize import normalize_layer
from modelyard.config.problems import ConfigPath, format_path
from modelyard.config.settings import LoadedConfig
from modelyard.config.sources import ConfigLayer, path_exists
from modelyard.core.errors import Conflict, Unavailable
from modelyard.core.knobs import Value
from modelyard.tune import edit
from modelyard.tune.places import aliases

_EDITORS = {".toml": edit.toml, ".json": edit.json_text}


class Applied(Struct, frozen=True):
    """The files that were changed, each with its backup."""

    files: dict[Path, Path]


def apply(loaded: LoadedConfig, changes: Mapping[ConfigPath, Value], backends: Mapping[str, str | None]) -> Applied:
    """All or nothing: the new texts are read back before the first file is touched."""
    files = writable(loaded)
    layers = [normalize_layer(str(file), sources.read_file(file))[0] for file in files]
    wanted: dict[Path, dict[edit.Path, Any]] = {}
    for loc, value in changes.items():
        file, path = _home(files, layers, loc, backends)
        wanted.setdefault(file, {})[path] = value
    if wanted and not any(layer.data.get("models") for layer in layers):
        wanted[files[-1]] = {**_embedded(), **wanted[files[-1]]}
    return Applied({file: _written(file, edits) for file, edits in wanted.items()})


def writable(loaded: LoadedConfig) -> list[Path]:
    """The configuration's files; there must be one."""
    files = [source for source in loaded.source if isinstance(source, Path)]
    if not files:
        raise Conflict(
            "there is no configuration file to write to: leave --apply out and save the recommendation as "
            "modelyard.toml, or name a file with --config"
        )
    return files


def _home(
    files: Sequence[Path], layers: Sequence[ConfigLayer], loc: ConfigPath, backends: Mapping[str, str | None]
) -> tuple[Path, edit.Path]:
    """The file that says it, else the one that has its section, else the last; and the path in its author's words."""
    for file, layer in reversed(list(zip(files, layers, strict=True))):
        for known in _spellings(loc, backends):
            if layer.has(known):
                return file, tuple(map(str, layer.original_path(known)))
    for file, layer in reversed(list(zip(files, layers, strict=True))):
        if layer.has(loc[:-1]):
            return file, tuple(map(str, layer.original_path(loc)))
    return files[-1], tuple(map(str, loc))


def _spellings(loc: ConfigPath, backends: Mapping[str, str | None]) -> list[ConfigPath]:
    """An engine's own field may stand under another of its names, or under `options`."""
    section, name, key = loc
    if section != "models":
        return [loc]
    names = [str(key), *sorted(aliases(backends.get(str(name)), str(key)) - {str(key)})]
    return [where for n in names for where in ((section, name, n), (section, name, "options", n))]


def _embedded() -> dict[edit.Path, Any]:
    """The built-in model, written out whole: a file that names a model takes the place of all of it."""
    flat: dict[edit.Path, Any] = {}
    for section in ("models", "caches"):
        for name, table in EMBEDDED_DEFAULTS[section].items():
            flat |= {(section, name, key): value for key, value in table.items()}
    return flat | {("routes",): EMBEDDED_DEFAULTS["routes"]}


def _written(file: Path, edits: Mapping[edit.Path, Any]) -> Path:
    old = file.read_text(encoding="utf-8-sig")
    new = _EDITORS[file.suffix.lower()](old, edits)
    draft = file.with_name(f".{file.name}.new{file.suffix}")
    try:
        draft.write_text(new, encoding="utf-8")
        _read_back(draft, edits)
        shutil.copymode(file, draft)
        backup = _backup(file)
        os.replace(draft, file)
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}; it is as it was") from error
    finally:
        draft.unlink(missing_ok=True)
    return backup


def _read_back(draft: Path, edits: Mapping[edit.Path, Any]) -> None:
    table = sources.read_file(draft)
    for path, value in edits.items():
        if not path_exists(table, path) or _at(table, path) != value:
            raise Conflict(f"{format_path(path)} could not be written; the file is as it was")


def _at(table: Any, path: ConfigPath) -> Any:
    for key in path:
        table = table[key]
    return table


def _backup(file: Path) -> Path:
    """Beside the file, never over another one, and with its ending: it can be read like the file itself."""
    for number in range(1000):
        backup = file.with_name(f"{file.stem}.bak{f'.{number}' if number else ''}{file.suffix}")
        if not backup.exists():
            shutil.copy2(file, backup)
            return backup
    raise Conflict(f"{file} has a thousand backups: remove some")


def overruled(path: Path | None, changes: Mapping[ConfigPath, Value], backends: Mapping[str, str | None]) -> list[str]:
    """What still does not hold after it was written, since the environment has the last word."""
    said = load_config(path).config.model_dump(exclude_unset=True)
    return [format_path(loc) for loc, value in changes.items() if not _holds(said, loc, value, backends)]


def _holds(said: Any, loc: ConfigPath, value: Value, backends: Mapping[str, str | None]) -> bool:
    paths = (where for where in _spellings(loc, backends) if path_exists(said, where))
    return next((bool(_at(said, where) == value) for where in paths), False)
