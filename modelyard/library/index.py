"""Which models were added, by name: one JSON file in the library's folder, replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.library.home import locked, models_folder


class Entry(Struct, frozen=True, omit_defaults=True):
    """`path` is the model's first file or its folder. What is `owned` is of our making or fetching and goes when the
    entry is removed."""

    name: str
    path: str
    source: str = "a local file"
    owned: bool = False


def entries() -> list[Entry]:
    file = _file()
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Entry])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}. Delete it and add the models again") from error


def find(name: str) -> Entry | None:
    return next((entry for entry in entries() if entry.name == name), None)


def put(entry: Entry) -> None:
    """Add it. A name that means another file already is an error; adding the same again changes nothing."""
    with locked(_lock()):
        kept = entries()
        other = next((e for e in kept if e.name == entry.name), None)
        if other is not None and other.path != entry.path:
            raise InvalidRequest(
                f"the library already has a {entry.name!r}, which is {other.path}: choose another name with --name",
                code="name_taken",
            )
        _write([e for e in kept if e.name != entry.name] + [entry])


def drop(name: str) -> None:
    with locked(_lock()):
        _write([entry for entry in entries() if entry.name != name])


def _file() -> Path:
    return models_folder() / "library.json"


def _lock() -> Path:
    return models_folder() / ".library.lock"


def _write(kept: list[Entry]) -> None:
    file = _file()
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2))
    fresh.replace(file)
