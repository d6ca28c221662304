"""Model files as rows for people: what they are, how large, and whether they are here."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import ModelyardError
from modelyard.library import default_model, gguf, model_files, shelf
from modelyard.library.model_files import LibraryEntry, ModelFolder
from modelyard.library.progress import size

Rows = list[tuple[str, str]]


class FileRow(Struct, frozen=True):
    """What a list shows of a model's file. `state` is "here", "missing", "not fetched yet" or what is wrong with it."""

    size: str = ""
    quant: str = ""
    state: str = ""


def file_row(path: str | None) -> FileRow:
    """Of a model whose weights are not a file, nothing."""
    if path is None:
        return FileRow()
    if default_model.is_default(path) and not default_model.is_fetched():
        return FileRow(size(default_model.DEFAULT_MODEL.size), "", "not fetched yet")
    if (folder := model_files.find_model_folder(path)) is not None:
        return FileRow(size(folder.size), folder.quant, "here")
    file = model_files.find_model_file(path)
    if file is None:
        return FileRow(state="missing")
    if file.suffix.lower() != ".gguf":
        return FileRow(state="here")
    try:
        about = gguf.facts(file)
    except ModelyardError:
        return FileRow(size(file.stat().st_size), "", "unreadable")
    return FileRow(size(about.size), about.quant, "here")


def explain(path: str | None) -> Rows:
    """What `models show` says of a file or folder; nothing where there is none that we can read."""
    if default_model.is_default(path) and not default_model.is_fetched():
        return [
            (
                "file",
                f"not fetched yet ({size(default_model.DEFAULT_MODEL.size)}): modelyard serve does that when it starts",
            )
        ]
    if path is not None and (folder := model_files.find_model_folder(path)) is not None:
        return _explain_folder(folder)
    file = model_files.find_model_file(path) if path is not None else None
    if file is None or file.suffix.lower() != ".gguf":
        return []
    about = gguf.facts(file)
    parts = len(model_files.split_parts(file))
    rows = [
        ("file", f"{file}, {size(about.size)}{f' in {parts} files' if parts > 1 else ''}"),
        ("architecture", f"{about.architecture}, {about.layers} layers"),
        ("parameters", _count(about.parameters)),
        ("quantization", about.quant),
        ("trained context", f"{about.trained_context} tokens" if about.trained_context else ""),
    ]
    return [row for row in rows if row[1]]


def _explain_folder(folder: ModelFolder) -> Rows:
    names = {"ct2": "CTranslate2", "hf": "Hugging Face"}
    rows = [("folder", f"{folder.path}, {size(folder.size)}"), ("kind", names[folder.kind])]
    return [*rows, ("quantization", folder.quant)] if folder.quant else rows


def explain_entry(entry: LibraryEntry) -> Rows:
    return [("model", entry.name), ("source", entry.source), *explain(entry.path), ("configuration", snippet(entry))]


def snippet(entry: LibraryEntry) -> str:
    """The lines that serve it."""
    return f'[models.{_key(entry.name)}]\npath = "{Path(entry.path).as_posix()}"'


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else f'"{name}"'


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number) if number else ""


def library_rows() -> list[tuple[LibraryEntry, FileRow]]:
    return [(entry, file_row(entry.path)) for entry in shelf.list_models()]
