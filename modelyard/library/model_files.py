"""Finds the model file or folder that a path means, and registers models by name.

A relative path is looked up in the current folder, in `./models`, as the repository of a model that was fetched
(`unsloth/MiMo-V2-Flash-GGUF:UD-Q6_K_XL`) and in the library's `models` folder, so that
`path = "unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL/"` works wherever the files are; last as a name in the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest, NotFound, Unavailable
from modelyard.library.cache_dir import file_lock, models_dir

# --- GGUF files -------------------------------------------------------------------------------------------------------

_SPLIT = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def candidate_paths(path: str) -> Iterator[Path]:
    """All paths that `path` may mean, best first."""
    candidate = Path(path).expanduser()
    yield candidate
    if not candidate.is_absolute() and not path.startswith(("./", "../")):
        yield Path("models") / candidate
        if (entry := find_fetched(path)) is not None:
            yield Path(entry.path)
        yield models_dir() / candidate
        if (entry := find_entry(path)) is not None:
            yield Path(entry.path)


def _searched(path: str) -> str:
    return ", ".join(str(candidate.parent) for candidate in candidate_paths(path))


def locate_model_file(path: str) -> Path:
    """The GGUF file to open: the file itself, the only one in a folder, or the first part of a split model."""
    for candidate in candidate_paths(path):
        if candidate.exists():
            return _require_all_parts(_only_model(candidate) if candidate.is_dir() else candidate)
    looked = f"looked in {_searched(path)}{pull_hint(path)}"
    raise NotFound(f"there is no model file {path!r}; {looked}", code="model_file_missing")


def pull_hint(path: str) -> str:
    """How to fetch what looks like a repository of the hub, perhaps with a variant; none for a path of this machine."""
    owner, _, rest = path.strip("/").partition("/")
    repo, _, variant = rest.partition("/")
    if not repo or "/" in variant or path.startswith(("/", ".", "~", "models/")) or path.lower().endswith(".gguf"):
        return ""
    return f"; fetch it: modelyard pull {owner}/{repo}{variant and f':{variant}'}"


def find_model_file(path: str) -> Path | None:
    """Like `locate_model_file`, but None if there is no complete model."""
    try:
        return locate_model_file(path)
    except (NotFound, InvalidRequest):
        return None


def locate_model_folder(path: str, marker: str) -> Path:
    """The folder that contains the file `marker`. `path` may also be the path of that file."""
    for candidate in candidate_paths(path):
        folder = candidate.parent if candidate.name == marker else candidate
        if (folder / marker).is_file():
            return folder
    raise NotFound(
        f"there is no model {path!r} (a folder with a {marker}); looked in {_searched(path)}", code="model_file_missing"
    )


def leads_to_gguf(path: str) -> bool:
    """Whether `path` leads to GGUF files, even if it is ambiguous which one is meant."""
    found = next((candidate for candidate in candidate_paths(path) if candidate.exists()), None)
    if found is None:
        return False
    return bool(gguf_files(found)) if found.is_dir() else found.suffix.lower() == ".gguf"


def gguf_files(folder: Path) -> list[Path]:
    """The language models in a folder; image projectors (mmproj) are parts of other models."""
    found = (file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    return sorted(file for file in found if "mmproj" not in file.name.lower())


def group_split_files(names: list[str]) -> dict[str, list[str]]:
    """File names by model; the parts of a split model are in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(base_name(name), []).append(name)
    return found


def base_name(name: str) -> str:
    """A file name without its suffix and without the number of a split part."""
    split = _SPLIT.fullmatch(name)
    return split["base"] if split else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def split_parts(file: Path) -> list[Path]:
    """All files of a model, from the path of any of them."""
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return [file]
    count = split["count"]
    return [file.with_name(f"{split['base']}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1)]


def _only_model(folder: Path) -> Path:
    models = group_split_files([file.name for file in gguf_files(folder)])
    if len(models) == 1:
        return folder / next(iter(models.values()))[0]
    if models:
        raise InvalidRequest(
            f"{folder} contains {len(models)} models: choose one of {', '.join(names[0] for names in models.values())}",
            code="model_file_ambiguous",
        )
    folders = sorted(f"{child.name}{os.sep}" for child in folder.iterdir() if child.is_dir() and gguf_files(child))
    hint = f"; these folders in it do: {', '.join(folders)}" if folders else ""
    raise NotFound(f"{folder} contains no GGUF file{hint}", code="model_file_missing")


def _require_all_parts(file: Path) -> Path:
    parts = split_parts(file)
    if missing := [part.name for part in parts if not part.exists()]:
        raise NotFound(
            f"{parts[0]} is split into {len(parts)} files; missing: {', '.join(missing)}", code="model_file_missing"
        )
    return parts[0]


# --- model folders ----------------------------------------------------------------------------------------------------

FolderFormat = Literal["ct2", "hf"]


class ModelFolder(Struct, frozen=True):
    """A CTranslate2 or Hugging Face folder. `quant` is empty if unknown."""

    path: Path
    kind: FolderFormat
    quant: str = ""

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


def find_model_folder(path: str) -> ModelFolder | None:
    for folder in candidate_paths(path):
        if (kind := folder_format(folder)) is not None:
            return ModelFolder(folder, kind, _noted_quantization(folder))
    return None


def folder_format(folder: Path) -> FolderFormat | None:
    if not folder.is_dir():
        return None
    if (folder / "model.bin").is_file() and any(
        (folder / f"vocabulary.{suffix}").is_file() for suffix in ("json", "txt")
    ):
        return "ct2"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "hf"
    return None


def _noted_quantization(folder: Path) -> str:
    """From the note that a conversion leaves in its folder."""
    try:
        note = msgspec.json.decode((folder / "modelyard.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return ""
    return str(note.get("quantization", ""))


# --- registered models ------------------------------------------------------------------------------------------------
#
# Stored in one JSON file in the library's folder, which is replaced as a whole.


_ENTRIES, _ENTRIES_LOCK = "library.json", ".library.lock"


class LibraryEntry(Struct, frozen=True, omit_defaults=True):
    """`path` is the model's first file or its folder. `owned`: we fetched or converted it, and delete it on removal.
    For a model of the hub `source` is its repository; `choice` says why this variant was chosen. `settings` are those
    of a model that was made from another one, `base`: its section of the configuration has them."""

    name: str
    path: str
    source: str = "a local file"
    owned: bool = False
    projector: str = ""
    quant: str = ""
    commit: str = ""
    choice: str = ""
    base: str = ""
    settings: dict[str, Any] = {}


def library_file() -> Path:
    return models_dir() / _ENTRIES


def read_entries() -> list[LibraryEntry]:
    file = library_file()
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[LibraryEntry])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}. Delete it and add the models again") from error


def find_entry(name: str) -> LibraryEntry | None:
    return next((entry for entry in read_entries() if entry.name == name), None)


def find_fetched(reference: str) -> LibraryEntry | None:
    """The model that was fetched from the hub for `owner/repo` or `owner/repo:quant`, with or without `hf.co/`."""
    wanted = reference.lower().removeprefix("https://").removeprefix("hf.co/").removeprefix("huggingface.co/")
    for entry in read_entries() if "/" in wanted else ():
        source = entry.source.lower()
        if entry.commit and wanted in (source, f"{source}:{entry.quant.lower()}"):
            return entry
    return None


def put_entry(entry: LibraryEntry) -> None:
    """Add an entry. It is an error if its name belongs to another path."""
    with file_lock(models_dir() / _ENTRIES_LOCK):
        entries = read_entries()
        other = next((e for e in entries if e.name == entry.name), None)
        if other is not None and other.path != entry.path:
            raise InvalidRequest(
                f"the library already has a {entry.name!r}, which is {other.path}: choose another name with --name",
                code="name_taken",
            )
        _write_entries([e for e in entries if e.name != entry.name] + [entry])


def remove_entry(name: str) -> None:
    with file_lock(models_dir() / _ENTRIES_LOCK):
        _write_entries([entry for entry in read_entries() if entry.name != name])


def _write_entries(entries: list[LibraryEntry]) -> None:
    file = models_dir() / _ENTRIES
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=2))
        temporary.replace(file)
    except OSError as error:
        raise Unavailable(f"the list of the library, {file}, cannot be written: {error.strerror}") from error
