"""Writes a recommendation into the user's configuration files: only the keys that change, with a backup beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelyard.config import sources
from modelyard.config.file_editor import SetValue, decode, edit_text, write_with_backup
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
    try:
        content = file.read_bytes()
    except OSError as error:
        raise Unavailable(f"{file} cannot be read: {error.strerror}") from error
    text = edit_text(file.suffix.lower(), decode(content), [SetValue(path, value) for path, value in edits.items()])
    return write_with_backup(file, text, content) or file


def _value_at(table: Any, path: ConfigPath) -> Any:
    for key in path:
        table = table[key]
    return table
