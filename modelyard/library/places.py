"""Where model files lie, and which file a path of the configuration means.

A relative path is looked for in the current folder, in `./models` and in the library's own `models` folder, so that
`path = "unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL/"` works wherever the files were put; last as a name in the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library import index
from modelyard.library.home import models_folder

_SPLIT = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def locate(path: str) -> Path:
    """The GGUF file to open: the file itself, the only one of a folder, the first of a split model."""
    for place in candidates(path):
        if place.exists():
            return _whole(_only(place)[0] if place.is_dir() else place)
    raise NotFound(
        f"there is no model file {path!r}; looked in {', '.join(str(place.parent) for place in candidates(path))}",
        code="model_file_missing",
    )


def locate_folder(path: str, holding: str) -> Path:
    """The folder of a model that is no GGUF file, known by a file in it; the path may also be that file's own."""
    for place in candidates(path):
        folder = place.parent if place.name == holding else place
        if (folder / holding).is_file():
            return folder
    raise NotFound(
        f"there is no model {path!r} (a folder with a {holding}); looked in "
        f"{', '.join(str(place.parent) for place in candidates(path))}",
        code="model_file_missing",
    )


def find(path: str) -> Path | None:
    """The same where it can be found and is complete, else None."""
    try:
        return locate(path)
    except (NotFound, InvalidRequest):
        return None


def leads_to_gguf(path: str) -> bool:
    """Whether a GGUF file is there at all, even where it is not clear which one is meant."""
    place = next((place for place in candidates(path) if place.exists()), None)
    if place is None:
        return False
    return bool(gguf_files(place)) if place.is_dir() else place.suffix.lower() == ".gguf"


def candidates(path: str) -> Iterator[Path]:
    """Everywhere that a path may mean, best first."""
    place = Path(path).expanduser()
    yield place
    if not place.is_absolute() and not path.startswith(("./", "../")):
        yield Path("models") / place
        yield models_folder() / place
        if (entry := index.find(path)) is not None:
            yield Path(entry.path)


def gguf_files(folder: Path) -> list[Path]:
    """Language models only: a projector of images is another model's part."""
    found = (file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    return sorted(file for file in found if not file.name.lower().startswith("mmproj"))


def groups(names: list[str]) -> dict[str, list[str]]:
    """The files of each model by what they have in common: a split model is one group, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(base_of(name), []).append(name)
    return found


def base_of(name: str) -> str:
    """A file's name without its ending and without the number of a split part."""
    split = _SPLIT.fullmatch(name)
    return split["base"] if split else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def parts(first: Path) -> list[Path]:
    """All files of a model, from the path of any of them."""
    split = _SPLIT.fullmatch(first.name)
    if split is None:
        return [first]
    count = split["count"]
    return [first.with_name(f"{split['base']}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1)]


def _only(folder: Path) -> list[Path]:
    models = groups([file.name for file in gguf_files(folder)])
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


def _whole(file: Path) -> Path:
    all_parts = parts(file)
    missing = [part.name for part in all_parts if not part.exists()]
    if missing:
        raise NotFound(
            f"{all_parts[0]} is split into {len(all_parts)} files, of which {', '.join(missing)} cannot be found",
            code="model_file_missing",
        )
    return all_parts[0]
