"""The library's models: adding, listing, describing and removing them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import default_model, gguf, huggingface, model_files
from modelyard.library.cache_dir import models_dir
from modelyard.library.model_files import LibraryEntry
from modelyard.library.progress import ProgressReporter, format_size

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")


def add_model(
    source: str, *, name: str | None = None, quant: str | None = None, progress: ProgressReporter | None = None
) -> LibraryEntry:
    """Add a local file or folder, or a repository of the hub (`org/repo` or `org/repo:quant`)."""
    if name is not None:
        _check_name(name)  # before a large download
    local = _find_local(source, quant)
    repo, _, tag = source.partition(":")
    if local is not None:
        entry = LibraryEntry(name or model_files.base_name(local.name), str(local))
    elif _REPO.fullmatch(repo):
        file = huggingface.fetch(repo, quant or tag or None, progress or ProgressReporter())
        short = re.sub(r"[-_.]gguf$", "", repo.rpartition("/")[2], flags=re.IGNORECASE)
        entry = LibraryEntry(name or short, str(file), repo, owned=True)
    else:
        raise NotFound(
            f"{source!r} is neither a local file or folder nor a repository such as org/name", param="source"
        )
    _check_name(entry.name)
    gguf.read_summary(Path(entry.path))  # fails for an unreadable file
    model_files.put_entry(entry)
    return entry


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be a model's name: use letters, digits and . _ - + / with --name", param="name"
        )


def _find_local(source: str, quant: str | None) -> Path | None:
    """In the current folder or in ./models. Files in the library's folder came from a hub and are not added again."""
    candidates = (Path(source).expanduser(), Path("models") / source)
    path = next((candidate.resolve() for candidate in candidates if candidate.exists()), None)
    if path is None:
        return None
    if quant is not None and path.is_dir():
        path = _find_quant(path, quant)
    return model_files.locate_model_file(str(path))


def _find_quant(folder: Path, quant: str) -> Path:
    """A quantization is a subfolder or part of a file name."""
    if (folder / quant).is_dir():
        return folder / quant
    files = (file for file in model_files.gguf_files(folder) if quant.lower() in file.name.lower())
    matching = {model_files.base_name(file.name): file for file in files}
    return next(iter(matching.values())) if len(matching) == 1 else folder


def list_models() -> list[LibraryEntry]:
    """All added models, and the default model if it has been fetched."""
    entries = model_files.read_entries()
    file = models_dir() / default_model.DEFAULT_MODEL.path
    if file.is_file() and all(Path(entry.path) != file for entry in entries):
        entries.insert(0, LibraryEntry("smollm2", str(file), default_model.DEFAULT_MODEL.requirement, owned=True))
    return entries


def find_model(name: str) -> LibraryEntry | None:
    return next((entry for entry in list_models() if entry.name == name), None)


def remove_model(name: str) -> LibraryEntry:
    """Remove an entry. Its files are deleted only if the library fetched or converted them."""
    entry = find_model(name)
    if entry is None:
        names = ", ".join(e.name for e in list_models()) or "nothing"
        raise NotFound(f"the library has no {name!r}; it has {names}")
    if entry.owned:
        _delete(Path(entry.path))
    model_files.remove_entry(name)
    return entry


def _delete(path: Path) -> None:
    """Delete a model's folder, or its files and the folders that have no model left. Only inside `models_dir()`."""
    root = models_dir().resolve()
    if path.is_dir() and path.resolve() != root and path.resolve().is_relative_to(root):
        shutil.rmtree(path)
        return
    for file in model_files.split_parts(path):
        if file.resolve().is_relative_to(root):
            file.unlink(missing_ok=True)
    folder = path.parent
    while folder.resolve() != root and folder.resolve().is_relative_to(root):
        if any(file.suffix.lower() == ".gguf" for file in folder.rglob("*")):
            break
        shutil.rmtree(folder, ignore_errors=True)  # metadata of the hub, locks
        folder = folder.parent


# --- descriptions -----------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]


class FileRow(Struct, frozen=True):
    """A model's file in a list. `state` is "here", "missing", "not fetched yet" or "unreadable"."""

    size: str = ""
    quant: str = ""
    state: str = ""


def file_row(path: str | None) -> FileRow:
    """Empty for a model without a file."""
    if path is None:
        return FileRow()
    if default_model.is_default(path) and not default_model.is_fetched():
        return FileRow(format_size(default_model.DEFAULT_MODEL.size), "", "not fetched yet")
    if (folder := model_files.find_model_folder(path)) is not None:
        return FileRow(format_size(folder.size), folder.quant, "here")
    file = model_files.find_model_file(path)
    if file is None:
        return FileRow(state="missing")
    if file.suffix.lower() != ".gguf":
        return FileRow(state="here")
    try:
        summary = gguf.read_summary(file)
    except ModelyardError:
        return FileRow(format_size(file.stat().st_size), "", "unreadable")
    return FileRow(format_size(summary.size), summary.quant, "here")


def describe_file(path: str | None) -> Rows:
    """The rows of `modelyard models show` about a file or folder; empty if there is none."""
    if default_model.is_default(path) and not default_model.is_fetched():
        size = format_size(default_model.DEFAULT_MODEL.size)
        return [("file", f"not fetched yet ({size}): modelyard serve fetches it at start")]
    if path is not None and (folder := model_files.find_model_folder(path)) is not None:
        kind = {"ct2": "CTranslate2", "hf": "Hugging Face"}[folder.kind]
        rows = [("folder", f"{folder.path}, {format_size(folder.size)}"), ("kind", kind)]
        return [*rows, ("quantization", folder.quant)] if folder.quant else rows
    file = model_files.find_model_file(path) if path is not None else None
    if file is None or file.suffix.lower() != ".gguf":
        return []
    summary = gguf.read_summary(file)
    parts = len(model_files.split_parts(file))
    rows = [
        ("file", f"{file}, {format_size(summary.size)}{f' in {parts} files' if parts > 1 else ''}"),
        ("architecture", f"{summary.architecture}, {summary.layers} layers"),
        ("parameters", _format_count(summary.parameters)),
        ("quantization", summary.quant),
        ("trained context", f"{summary.trained_context} tokens" if summary.trained_context else ""),
    ]
    return [row for row in rows if row[1]]


def _format_count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number) if number else ""


def describe_entry(entry: LibraryEntry) -> Rows:
    return [
        ("model", entry.name),
        ("source", entry.source),
        *describe_file(entry.path),
        ("configuration", config_snippet(entry)),
    ]


def config_snippet(entry: LibraryEntry) -> str:
    """The configuration that serves the model."""
    name = entry.name
    is_bare_key = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
    key = name if is_bare_key else f'"{name}"'
    return f'[models.{key}]\npath = "{Path(entry.path).as_posix()}"'
