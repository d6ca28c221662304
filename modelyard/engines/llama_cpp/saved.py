"""The folder of saved KV: a file for each sequence, whole or not there, bounded, and the newest kept longest.

What does not fit to what runs here is left where it is, and the log says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

from modelyard.engines.llama_cpp.image import Bytes, Head, Image, Origin, Unfit, Worn, differences, pack, unpack
from modelyard.engines.llama_cpp.sequences import Adapters

log = logging.getLogger(__name__)

_LARGE = 512 << 20  # bytes from which one is told how far it is


class Store:
    """All saved KV of one model, in a folder that others may share. `limit` is in bytes, for all of them together."""

    def __init__(self, root: Path, model: str, limit: int) -> None:
        self.root, self.folder, self.limit = root, root / _slug(model), limit

    def files(self, cache: str) -> list[Path]:
        """The newest first."""
        return [file for file, _ in _by_age(self.folder.glob(f"{_slug(cache)}-*.kv"))]

    def read(self, file: Path, origin: Origin, worn: Callable[[Adapters], Worn]) -> Image | None:
        """None where it does not fit; the log says why."""

        def check(head: Head) -> None:
            wrong = differences(head.origin, origin)
            if not wrong and worn(head.adapters) != head.worn:
                wrong = [f"adapters were {head.worn} and are {worn(head.adapters)}"]
            if wrong:
                raise Unfit("; ".join(wrong))

        try:
            with file.open("rb") as data:
                return unpack(data, os.fstat(data.fileno()).st_size, check)
        except (Unfit, OSError) as fault:
            log.warning("the saved KV in %s is left out: %s", file, fault)
            return None

    def write(self, origin: Origin, image: Image) -> str | None:
        """The new file, whole or not at all; None where there is no room for it."""
        if image.size > self.limit:
            log.warning(
                "the KV of %d tokens takes %d MiB and kv_store_mb is %d: it is not saved",
                len(image.tokens),
                image.size >> 20,
                self.limit >> 20,
            )
            return None
        try:
            return self._write(image.size, pack(origin, image), f"{_slug(origin.cache)}-{secrets.token_hex(8)}")
        except OSError as fault:
            log.warning("the KV of the cache %r cannot be saved in %s: %s", origin.cache, self.folder, fault)
            return None

    def _write(self, size: int, pieces: Iterator[Bytes], stem: str) -> str:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.make_room(size)
        part, file = self.folder / f"{stem}.{os.getpid()}.part", self.folder / f"{stem}.kv"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as data:
                _pour(pieces, data, size, file)
            self.touch(str(part))
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return str(file)

    def touch(self, file: str) -> bool:
        """Makes it the newest; False where it is gone. The system's own stamps are too coarse to order by."""
        now = time.time_ns()
        try:
            os.utime(file, ns=(now, now))
        except OSError:
            return False
        return True

    def drop(self, file: str | None) -> None:
        if file is not None:
            _remove(Path(file))

    def make_room(self, size: int) -> None:
        """The oldest go until so many bytes more would fit; so does what a process left half written as it died."""
        room = self.limit - size
        for part in self.root.glob("*/*.part"):
            writer = re.search(r"\.(\d+)\.part$", part.name)
            if writer and not psutil.pid_exists(int(writer[1])):
                _remove(part)
        for file, held in _by_age(self.root.glob("*/*.kv")):
            room -= held
            if room < 0:
                log.info("the saved KV in %s goes, to make room", file)
                _remove(file)


def _remove(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        file.unlink()


def _pour(pieces: Iterator[Bytes], into: IO[bytes], size: int, file: Path) -> None:
    written, told = 0, 0
    for piece in pieces:
        into.write(piece)
        written += len(piece)
        if written - told >= _LARGE:
            log.info("saving KV to %s: %d of %d MiB", file, written >> 20, size >> 20)
            told = written


def _by_age(files: Iterator[Path]) -> list[tuple[Path, int]]:
    """The newest first, each with its size."""
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            stat = file.stat()
            found.append((stat.st_mtime_ns, file, stat.st_size))
    return [(file, size) for _, file, size in sorted(found, reverse=True)]


def _slug(name: str) -> str:
    """A name that any file system takes, and no other name has."""
    tail = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._]+', '_', name)[:40].strip('.')}.{tail}"
