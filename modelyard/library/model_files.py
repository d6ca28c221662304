"""Where model files lie, and which file a path of the configuration means.

A relative path is looked for in the current folder, in `./models` and in the library's own `models` folder, so that
`path = "unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL/"` works wherever the files were put; last as a name in the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library.cache_dir import file_lock, models_dir

_SPLIT = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def locate_model_file(path: str) -> Path:
    """The GGUF file to open: the file itself, the only one of a folder, the first of a split model."""
    for place in candidate_paths(path):
        if place.exists():
            return _require_all_parts(_only_model(place)[0] if place.is_dir() else place)
    raise NotFound(
        f"there is no model file {path!r}; looked in {', '.join(str(place.parent) for place in candidate_paths(path))}",
        code="model_file_missing",
    )


def locate_model_folder(path: str, holding: str) -> Path:
    """The folder of a model that is no GGUF file, known by a file in it; the path may also be that file's own."""
    for place in candidate_paths(path):
        folder = place.parent if place.name == holding else place
        if (folder / holding).is_file():
            return folder
    raise NotFound(
        f"there is no model {path!r} (a folder with a {holding}); looked in "
        f"{', '.join(str(place.parent) for place in candidate_paths(path))}",
        code="model_file_missing",
    )


def find_model_file(path: str) -> Path | None:
    """The same where it can be found and is complete, else None."""
    try:
        return locate_model_file(path)
    except (NotFound, InvalidRequest):
        return None


def leads_to_gguf(path: str) -> bool:
    """Whether a GGUF file is there at all, even where it is not clear which one is meant."""
    place = next((place for place in candidate_paths(path) if place.exists()), None)
    if place is None:
        return False
    return bool(gguf_files(place)) if place.is_dir() else place.suffix.lower() == ".gguf"


def candidate_paths(path: str) -> Iterator[Path]:
    """Everywhere that a path may mean, best first."""
    place = Path(path).expanduser()
    yield place
    if not place.is_absolute() and not path.startswith(("./", "../")):
        yield Path("models") / place
        yield models_dir() / place
        if (entry := find_entry(path)) is not None:
            yield Path(entry.path)


def gguf_files(folder: Path) -> list[Path]:
    """Language models only: a projector of images is another model's part."""
    found = (file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    return sorted(file for file in found if not file.name.lower().startswith("mmproj"))


def group_split_files(names: list[str]) -> dict[str, list[str]]:
    """The files of each model by what they have in common: a split model is one group, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(base_name(name), []).append(name)
    return found


def base_name(name: str) -> str:
    """A file's name without its ending and without the number of a split part."""
    split = _SPLIT.fullmatch(name)
    return split["base"] if split else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def split_parts(first: Path) -> list[Path]:
    """All files of a model, from the path of any of them."""
    split = _SPLIT.fullmatch(first.name)
    if split is None:
        return [first]
    count = split["count"]
    return [first.with_name(f"{split['base']}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1)]


def _only_model(folder: Path) -> list[Path]:
    models = group_split_files([file.name for file in gguf_files(folder)])
    if len(models) == 1:
        return [folder / name for name in next(iter(models.values()))]
    if models:
        raise InvalidRequest(
            f"{folder} holds {len(models)} models: name one of {', '.join(names[0] for names in models.values())}",
            code="model_file_ambiguous",
        )
    inner = sorted(f"{place.name}{os.sep}" for place in folder.iterdir() if place.is_dir() and gguf_files(place))
    hint = f"; it has folders that do: {', '.join(inner)}" if inner else ""
    raise NotFound(f"{folder} holds no GGUF file{hint}", code="model_file_missing")


def _require_all_parts(file: Path) -> Path:
    all_parts = split_parts(file)
    missing = [part.name for part in all_parts if not part.exists()]
    if missing:
        raise NotFound(
            f"{all_parts[0]} is split into {len(all_parts)} files, of which {', '.join(missing)} cannot be found",
            code="model_file_missing",
        )
    return all_parts[0]


# Models that are a folder, not a GGUF file: CTranslate2's and Hugging Face's, told apart by what lies in them.

FolderFormat = Literal["ct2", "hf"]


class ModelFolder(Struct, frozen=True):
    """`quant` is empty where nobody has noted it."""

    path: Path
    kind: FolderFormat
    quant: str = ""

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


class _ConversionNote(Struct, frozen=True):
    """What a conversion of ours leaves in its folder, as far as lists show it."""

    quantization: str = ""


def find_model_folder(path: str) -> ModelFolder | None:
    for place in candidate_paths(path):
        if (kind := folder_format(place)) is not None:
            return ModelFolder(place, kind, _noted_quantization(place))
    return None


def folder_format(place: Path) -> FolderFormat | None:
    if not place.is_dir():
        return None
    if (place / "model.bin").is_file() and any(
        (place / f"vocabulary.{ending}").is_file() for ending in ("json", "txt")
    ):
        return "ct2"
    if (place / "config.json").is_file() and any(place.glob("*.safetensors")):
        return "hf"
    return None


def _noted_quantization(place: Path) -> str:
    try:
        return msgspec.json.decode((place / "modelyard.json").read_bytes(), type=_ConversionNote).quantization
    except (OSError, msgspec.MsgspecError):
        return ""


# Which models were added, by name: one JSON file in the library's folder, replaced as a whole.


class LibraryEntry(Struct, frozen=True, omit_defaults=True):
    """`path` is the model's first file or its folder. What is `owned` is of our making or fetching and goes when the
    entry is removed."""

    name: str
    path: str
    source: str = "a local file"
    owned: bool = False


def read_entries() -> list[LibraryEntry]:
    file = _file()
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[LibraryEntry])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}. Delete it and add the models again") from error


def find_entry(name: str) -> LibraryEntry | None:
    return next((entry for entry in read_entries() if entry.name == name), None)


def put_entry(entry: LibraryEntry) -> None:
    """Add it. A name that means another file already is an error; adding the same again changes nothing."""
    with file_lock(_lock()):
        kept = read_entries()
        other = next((e for e in kept if e.name == entry.name), None)
        if other is not None and other.path != entry.path:
            raise InvalidRequest(
                f"the library already has a {entry.name!r}, which is {other.path}: choose another name with --name",
                code="name_taken",
            )
        _write([e for e in kept if e.name != entry.name] + [entry])


def remove_entry(name: str) -> None:
    with file_lock(_lock()):
        _write([entry for entry in read_entries() if entry.name != name])


def _file() -> Path:
    return models_dir() / "library.json"


def _lock() -> Path:
    return models_dir() / ".library.lock"


def _write(kept: list[LibraryEntry]) -> None:
    file = _file()
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2))
    fresh.replace(file)
