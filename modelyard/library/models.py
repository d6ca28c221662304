"""Adding models to the library, and taking them out again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import default_model, gguf, huggingface, model_files
from modelyard.library.cache_dir import models_dir
from modelyard.library.model_files import LibraryEntry, ModelFolder
from modelyard.library.progress import ProgressReporter, format_size

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")


def add_model(
    source: str, *, name: str | None = None, quant: str | None = None, meter: ProgressReporter | None = None
) -> LibraryEntry:
    """A file or folder of this machine, else a repository of the hub (`org/repo` or `org/repo:quant`)."""
    if name is not None:
        _check_name(name)  # before anything large is fetched
    local = _local(source, quant)
    repo, _, tagged = source.partition(":")
    if local is not None:
        entry = LibraryEntry(name or model_files.base_name(local.name), str(local))
    elif _REPO.fullmatch(repo):
        file = huggingface.fetch(repo, quant or tagged or None, meter or ProgressReporter())
        entry = LibraryEntry(name or _short(repo), str(file), repo, owned=True)
    else:
        raise NotFound(f"{source!r} is neither a file or folder here nor a repository such as org/name", param="source")
    _check_name(entry.name)
    gguf.read_summary(Path(entry.path))  # what cannot be read is not worth a name
    model_files.put_entry(entry)
    return entry


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be a model's name: use letters, digits and . _ - + / with --name", param="name"
        )


def _local(source: str, quant: str | None) -> Path | None:
    """In the current folder or under ./models; what lies in the library itself came from a hub and is its business."""
    places_to_look = (Path(source).expanduser(), Path("models") / source)
    place = next((place.resolve() for place in places_to_look if place.exists()), None)
    if place is None:
        return None
    return model_files.locate_model_file(str(_inner(place, quant) if quant is not None and place.is_dir() else place))


def _inner(folder: Path, quant: str) -> Path:
    """A quantization is an inner folder, or a part of a file's name."""
    if (folder / quant).is_dir():
        return folder / quant
    fitting = {
        model_files.base_name(f.name): f for f in model_files.gguf_files(folder) if quant.lower() in f.name.lower()
    }
    return next(iter(fitting.values())) if len(fitting) == 1 else folder


def _short(repo: str) -> str:
    return re.sub(r"[-_.]gguf$", "", repo.rpartition("/")[2], flags=re.IGNORECASE)


def find_model(name: str) -> LibraryEntry | None:
    """An entry by name; the default model is one as soon as it is here."""
    return next((entry for entry in list_models() if entry.name == name), None)


def list_models() -> list[LibraryEntry]:
    """All that was added, and the default model where it has been fetched."""
    found = model_files.read_entries()
    file = models_dir() / default_model.DEFAULT_MODEL.path
    if file.is_file() and all(Path(entry.path) != file for entry in found):
        found.insert(0, LibraryEntry("smollm2", str(file), default_model.DEFAULT_MODEL.requirement, owned=True))
    return found


def get_model(name: str) -> LibraryEntry:
    entry = find_model(name)
    if entry is None:
        known = ", ".join(e.name for e in list_models()) or "nothing"
        raise NotFound(f"the library has no {name!r}; it has {known}")
    return entry


def remove_model(name: str) -> LibraryEntry:
    """Forget it; files go only where the library fetched or made them itself."""
    entry = get_model(name)
    if entry.owned:
        _delete(Path(entry.path))
    model_files.remove_entry(name)
    return entry


def _delete(first: Path) -> None:
    root = models_dir().resolve()
    if first.is_dir() and first.resolve() != root and first.resolve().is_relative_to(root):
        shutil.rmtree(first)
        return
    for file in model_files.split_parts(first):
        if file.resolve().is_relative_to(root):
            file.unlink(missing_ok=True)
    folder = first.parent
    while folder.resolve() != root and folder.resolve().is_relative_to(root) and not _has_models(folder):
        shutil.rmtree(folder, ignore_errors=True)  # the hub's own notes, locks
        folder = folder.parent


def _has_models(folder: Path) -> bool:
    return any(file.suffix.lower() == ".gguf" for file in folder.rglob("*"))


# Model files as rows for people: what they are, how large, and whether they are here.

Rows = list[tuple[str, str]]


class FileRow(Struct, frozen=True):
    """What a list shows of a model's file. `state` is "here", "missing", "not fetched yet" or what is wrong with it."""

    format_size: str = ""
    quant: str = ""
    state: str = ""


def file_row(path: str | None) -> FileRow:
    """Of a model whose weights are not a file, nothing."""
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
        about = gguf.read_summary(file)
    except ModelyardError:
        return FileRow(format_size(file.stat().st_size), "", "unreadable")
    return FileRow(format_size(about.size), about.quant, "here")


def describe_file(path: str | None) -> Rows:
    """What `models show` says of a file or folder; nothing where there is none that we can read."""
    if default_model.is_default(path) and not default_model.is_fetched():
        return [
            (
                "file",
                f"not fetched yet ({format_size(default_model.DEFAULT_MODEL.size)}): modelyard serve does that when it starts",
            )
        ]
    if path is not None and (folder := model_files.find_model_folder(path)) is not None:
        return _explain_folder(folder)
    file = model_files.find_model_file(path) if path is not None else None
    if file is None or file.suffix.lower() != ".gguf":
        return []
    about = gguf.read_summary(file)
    parts = len(model_files.split_parts(file))
    rows = [
        ("file", f"{file}, {format_size(about.size)}{f' in {parts} files' if parts > 1 else ''}"),
        ("architecture", f"{about.architecture}, {about.layers} layers"),
        ("parameters", _count(about.parameters)),
        ("quantization", about.quant),
        ("trained context", f"{about.trained_context} tokens" if about.trained_context else ""),
    ]
    return [row for row in rows if row[1]]


def _explain_folder(folder: ModelFolder) -> Rows:
    names = {"ct2": "CTranslate2", "hf": "Hugging Face"}
    rows = [("folder", f"{folder.path}, {format_size(folder.size)}"), ("kind", names[folder.kind])]
    return [*rows, ("quantization", folder.quant)] if folder.quant else rows


def describe_entry(entry: LibraryEntry) -> Rows:
    return [
        ("model", entry.name),
        ("source", entry.source),
        *describe_file(entry.path),
        ("configuration", config_snippet(entry)),
    ]


def config_snippet(entry: LibraryEntry) -> str:
    """The lines that serve it."""
    return f'[models.{_key(entry.name)}]\npath = "{Path(entry.path).as_posix()}"'


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else f'"{name}"'


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number) if number else ""


def list_rows() -> list[tuple[LibraryEntry, FileRow]]:
    return [(entry, file_row(entry.path)) for entry in list_models()]
