"""The folder of saved KV: a file for each sequence, whole or not there, bounded, and the newest kept longest.

What does not fit to what runs here is left where it is, and the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import psutil
from msgspec.structs import replace

from modelyard.core.engine import EngineSpec
from modelyard.engines.llama_cpp.context import LlamaContext
from modelyard.engines.llama_cpp.kv_memory import kv_layout
from modelyard.engines.llama_cpp.kv_snapshot import (
    AdapterVersions,
    Bytes,
    KvOrigin,
    KvSnapshot,
    SnapshotHeader,
    SnapshotMismatch,
    decode_snapshot,
    encode_snapshot,
    file_identity,
    origin_differences,
)
from modelyard.engines.llama_cpp.library import RELEASE
from modelyard.engines.llama_cpp.lora import LoraAdapters
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sequences import AdapterSet, SequenceSlot
from modelyard.library.cache_dir import cache_dir
from modelyard.library.model_files import split_parts

log = logging.getLogger(__name__)

_LARGE = 512 << 20  # bytes from which one is told how far it is


class SnapshotFolder:
    """All saved KV of one model, in a folder that others may share. `limit` is in bytes, for all of them together."""

    def __init__(self, root: Path, model: str, limit: int) -> None:
        self.root, self.folder, self.limit = root, root / _slug(model), limit

    def files(self, cache: str) -> list[Path]:
        """The newest first."""
        return [file for file, _ in _by_age(self.folder.glob(f"{_slug(cache)}-*.kv"))]

    def read(self, file: Path, origin: KvOrigin, worn: Callable[[AdapterSet], AdapterVersions]) -> KvSnapshot | None:
        """None where it does not fit; the log says why."""

        def check(head: SnapshotHeader) -> None:
            wrong = origin_differences(head.origin, origin)
            if not wrong and worn(head.adapters) != head.worn:
                wrong = [f"adapters were {head.worn} and are {worn(head.adapters)}"]
            if wrong:
                raise SnapshotMismatch("; ".join(wrong))

        try:
            with file.open("rb") as data:
                return decode_snapshot(data, os.fstat(data.fileno()).st_size, check)
        except (SnapshotMismatch, OSError) as fault:
            log.warning("the saved KV in %s is left out: %s", file, fault)
            return None

    def write(self, origin: KvOrigin, image: KvSnapshot) -> str | None:
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
            return self._write(
                image.size, encode_snapshot(origin, image), f"{_slug(origin.cache)}-{secrets.token_hex(8)}"
            )
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


# Keeps the KV of an engine's caches over its end: saved to files when it closes, restored when it opens.
#
# Taking KV out of a context and putting it in belongs to the engine's thread; files are read and written anywhere.

Order = Callable[[Callable[[], None]], Awaitable[None]]  # has something done on the engine's thread

_POSITIONS = (
    "rope_scaling",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


def store_folder(options: Options) -> Path | None:
    if isinstance(options.kv_store, str):
        return Path(options.kv_store).expanduser()
    return cache_dir() / "kv" if options.kv_store else None


def create_kv_store(spec: EngineSpec, file: Path, wardrobe: LoraAdapters) -> KvStore | None:
    """None where nothing is to be saved."""
    folder = store_folder(spec.options)
    return KvStore(folder, spec, file, wardrobe) if folder is not None else None


class KvStore:
    def __init__(self, folder: Path, spec: EngineSpec, file: Path, wardrobe: LoraAdapters) -> None:
        options: Options = spec.options
        self._store = SnapshotFolder(folder, spec.model, options.kv_store_mb << 20)
        self._wardrobe = wardrobe
        model = file_identity(split_parts(file))
        told = {name: getattr(options, name) for name in _POSITIONS}
        positions = {name: value for name, value in told.items() if value is not None}
        self._origins = {
            name: KvOrigin(RELEASE, model, name, info.window, kv_layout(info, options), positions)
            for name, info in spec.caches.items()
        }

    # --- at the ends of an engine's life ----------------------------------------------------------------------------

    def save_all(self, caches: Iterable[LlamaContext]) -> None:
        for cache in caches:
            for slot in _oldest_first(cache):
                image = self._take(cache, slot)
                file = self._write(cache, image) if image is not None else None
                if image is not None and file is not None:
                    self._note(cache, slot, image, file)

    def restore_all(self, caches: Iterable[LlamaContext], go_on: Callable[[], bool]) -> None:
        for cache in caches:
            for file in self._store.files(cache.name):
                if not go_on() or cache.places.empty is None:
                    break
                self._adopt(cache, str(file), self._read(cache, file))

    # --- while it runs ----------------------------------------------------------------------------------------------

    async def save(self, cache: LlamaContext, order: Order) -> None:
        """Streams go on between two sequences, and while a file is written."""
        for slot in _oldest_first(cache):
            taken: list[KvSnapshot | None] = []
            await order(lambda slot=slot, taken=taken: taken.append(self._take(cache, slot)))  # type: ignore[misc]
            file = await asyncio.to_thread(self._write, cache, taken[0]) if taken[0] is not None else None
            if taken[0] is not None and file is not None:
                await order(partial(self._note, cache, slot, taken[0], file))

    async def restore(self, cache: LlamaContext, order: Order) -> None:
        """Into sequences that are empty: nobody's KV goes for it."""
        for file in await asyncio.to_thread(self._store.files, cache.name):
            if cache.places.empty is None:
                break
            image = await asyncio.to_thread(self._read, cache, file)
            await order(partial(self._adopt, cache, str(file), image))

    # --- one by one -------------------------------------------------------------------------------------------------

    def _take(self, cache: LlamaContext, slot: SequenceSlot) -> KvSnapshot | None:
        """None where its file holds all of it; then that becomes the newest."""
        if slot.file is not None and slot.saved == len(slot.tokens) and self._store.touch(slot.file):
            return None
        image = cache.places.image(slot)
        return None if image is None else replace(image, worn=self._wardrobe.worn(image.adapters))

    def _write(self, cache: LlamaContext, image: KvSnapshot) -> str | None:
        file = self._store.write(self._origins[cache.name], image)
        if file is not None:
            log.info("saved KV of %d tokens of the cache %r: %d MiB", len(image.tokens), cache.name, image.size >> 20)
        return file

    def _note(self, cache: LlamaContext, slot: SequenceSlot, image: KvSnapshot, file: str) -> None:
        self._store.drop(cache.places.note(slot, image, file))

    def _read(self, cache: LlamaContext, file: Path) -> KvSnapshot | None:
        return self._store.read(file, self._origins[cache.name], self._wardrobe.worn)

    def _adopt(self, cache: LlamaContext, file: str, image: KvSnapshot | None) -> None:
        if image is None or self._wardrobe.worn(image.adapters) != image.worn:  # gone since it was read
            return
        if cache.places.adopt(image, file):
            log.info("restored KV of %d tokens of the cache %r", len(image.tokens), cache.name)
        else:
            log.info("the saved KV in %s is not needed, or finds no place in the cache %r", file, cache.name)


def _oldest_first(cache: LlamaContext) -> list[SequenceSlot]:
    """What was used last is to be the newest file."""
    return sorted(cache.slots, key=lambda slot: slot.used)
