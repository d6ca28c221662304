"""Saves the KV of an engine's caches to files when it closes, and restores it when it opens.

Exporting KV from a context and restoring it belongs to the engine's thread; files are read and written on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import psutil
from msgspec.structs import replace

from modelyard.core.engine import EngineSpec, MovedKv
from modelyard.core.errors import InvalidRequest, NotFound, Unavailable
from modelyard.engines.llama_cpp.adapters import LoraAdapters, control_vectors_identity
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.kv_snapshot import (
    AdapterVersions,
    Buffer,
    KvOrigin,
    KvSnapshot,
    SnapshotHeader,
    SnapshotMismatch,
    StoredKv,
    decode_snapshot,
    decode_stored,
    encode_snapshot,
    file_identity,
    origin_differences,
)
from modelyard.engines.llama_cpp.loading import ROPE_OPTIONS
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sequence_manager import SequenceManager
from modelyard.engines.llama_cpp.sequences import MIN_COPY, AdapterSet, SequenceSlot
from modelyard.library.attempts import Attempts
from modelyard.library.cache_dir import cache_dir
from modelyard.library.model_files import split_parts

log = logging.getLogger(__name__)
T = TypeVar("T")

RunOnThread = Callable[[Callable[[], Any]], Awaitable[Any]]  # between two steps of the engine

_PROGRESS_BYTES = 512 << 20  # a large file logs its progress
_MIN_FREE = 1 << 30  # bytes of the disk that saved KV leaves alone
_NAMED = "slot-"  # the beginning of the files that clients name; those of a cache have a dot before the dash
_POSITION_OPTIONS = ("rope_scaling", *ROPE_OPTIONS)


def store_folder(options: Options, env: Mapping[str, str] = os.environ) -> Path | None:
    """None if kv_store is off."""
    if options.kv_store == "auto":
        return None if env.get("MODELYARD_KV_STORE") == "off" else cache_dir() / "kv"
    if isinstance(options.kv_store, str):
        return Path(options.kv_store).expanduser()
    return cache_dir() / "kv" if options.kv_store else None


class KvStore:
    def __init__(
        self, folder: Path, spec: EngineSpec, file: Path, adapters: LoraAdapters, caches: Iterable[SequenceManager]
    ) -> None:
        options: Options = spec.options
        self._folder = SnapshotFolder(folder, spec.model, options.kv_store_mb << 20)
        self._least = MIN_COPY if options.kv_store == "auto" else 1  # tokens
        self._adapters = adapters
        model = file_identity(split_parts(file))
        values = {name: getattr(options, name) for name in _POSITION_OPTIONS}
        positions = {name: value for name, value in values.items() if value is not None}
        if vectors := control_vectors_identity(options):
            positions["control_vectors"] = str(vectors)
        self._origins = {
            cache.name: KvOrigin(lib.identity, model, cache.name, cache.info.window, cache.kv.layout, positions)
            for cache in caches
        }

    # --- when the engine opens and closes -----------------------------------------------------------------------------

    def save_all(self, caches: Iterable[SequenceManager]) -> None:
        for cache in caches:
            for parked in cache.parked_only:
                if len(parked.tokens) >= self._least:
                    self._save_parked(cache, parked)
            for slot in _oldest_first(cache):
                snapshot = self._snapshot(cache, slot) if len(slot.tokens) >= self._least else None
                file = self._write(cache, snapshot) if snapshot is not None else None
                if snapshot is not None and file is not None:
                    self._mark_saved(cache, slot, snapshot, file)

    def _save_parked(self, cache: SequenceManager, parked: KvSnapshot) -> None:
        if parked.file is not None and parked.saved == len(parked.tokens) and self._folder.touch(parked.file):
            return
        versions = self._adapters.versions(parked.adapters)
        if self._write(cache, replace(parked, adapter_versions=versions)) is not None and parked.file is not None:
            Path(parked.file).unlink(missing_ok=True)

    def restore_all(self, caches: Iterable[SequenceManager], is_wanted: Callable[[], bool]) -> None:
        for cache in caches:
            for file in self._folder.files(cache.name):
                if not is_wanted():
                    break
                if not cache.has_room:
                    self._note(cache, file)
                    continue
                with Attempts().trying(f"kv {file}") as may_try:
                    if may_try:
                        self._restore(cache, str(file), self._read(cache, file))
                    else:
                        log.error("the saved KV in %s was set aside: the server died with it twice", file)

    # --- while it runs ------------------------------------------------------------------------------------------------

    async def save(self, cache: SequenceManager, run_on_thread: RunOnThread) -> None:
        """Streams continue between two sequences, and while a file is written."""
        for slot in _oldest_first(cache):
            snapshot = await run_on_thread(partial(self._snapshot, cache, slot))
            file = await asyncio.to_thread(self._write, cache, snapshot) if snapshot is not None else None
            if snapshot is not None and file is not None:
                await run_on_thread(partial(self._mark_saved, cache, slot, snapshot, file))

    async def restore(self, cache: SequenceManager, run_on_thread: RunOnThread) -> None:
        """Into empty sequences; evicts nothing."""
        for file in await asyncio.to_thread(self._folder.files, cache.name):
            if cache.empty_slot is None:
                break
            snapshot = await asyncio.to_thread(self._read, cache, file)
            await run_on_thread(partial(self._restore, cache, str(file), snapshot))

    def fetch(self, cache: SequenceManager, leaf: StoredKv) -> KvSnapshot | None:
        """Reads what is in a file only. Any thread may call it."""
        return self._read(cache, Path(leaf.file))

    # --- one sequence that a client names -----------------------------------------------------------------------------

    async def save_slot(
        self, cache: SequenceManager, number: int, scope: str, name: str, run_on_thread: RunOnThread
    ) -> MovedKv:
        """Into the file of this name and scope, which it replaces."""

        def export() -> KvSnapshot:
            snapshot = cache.snapshot(cache.idle_slot(number, scope))
            if snapshot is None:
                raise InvalidRequest(f"slot {number} is empty: nothing is saved", code="slot_empty")
            return replace(snapshot, adapter_versions=self._adapters.versions(snapshot.adapters))

        snapshot = await run_on_thread(export)
        origin, stem = self._origins[cache.name], file_stem(scope, name)
        file = await asyncio.to_thread(self._folder.write, origin, snapshot, stem)
        if file is None:
            raise Unavailable(f"slot {number} was not saved: the log of the server says why", code="kv_not_saved")
        return MovedKv(len(snapshot.tokens), os.stat(file).st_size)

    async def restore_slot(
        self, cache: SequenceManager, number: int, scope: str, name: str, run_on_thread: RunOnThread
    ) -> MovedKv:
        """What the sequence held is lost; what it had saved stays."""
        file = self._folder.folder / f"{file_stem(scope, name)}.kv"
        if not await asyncio.to_thread(file.is_file):
            raise NotFound(f"no slot was saved as {name[:200]!r}", code="no_such_file")
        snapshot = await asyncio.to_thread(self._read, cache, file)
        versions = {} if snapshot is None else {snapshot.adapters: snapshot.adapter_versions}

        def fill() -> bool:
            slot = cache.idle_slot(number, scope)
            fits = snapshot is not None and snapshot.scope == scope
            fits = fits and all(self._adapters.versions(each) == version for each, version in versions.items())
            return fits and snapshot is not None and cache.fill(slot, snapshot)

        if not await run_on_thread(fill) or snapshot is None:
            message = f"what was saved as {name[:200]!r} does not fit this model as it runs now: the log says why"
            raise InvalidRequest(message, code="kv_does_not_fit")
        return MovedKv(len(snapshot.tokens), file.stat().st_size)

    # --- one sequence -------------------------------------------------------------------------------------------------

    def _note(self, cache: SequenceManager, file: Path) -> None:
        """What has no room in memory stays a leaf of the tree: a prompt that goes on with it reads the file."""
        leaf = self._folder.read_leaf(file, self._origins[cache.name], self._adapters.versions)
        if leaf is not None:
            cache.note_stored(leaf)

    def _snapshot(self, cache: SequenceManager, slot: SequenceSlot) -> KvSnapshot | None:
        """None if the sequence's file has all of it; that file becomes the newest."""
        if slot.file is not None and slot.saved == len(slot.tokens) and self._folder.touch(slot.file):
            return None
        snapshot = cache.snapshot(slot)
        if snapshot is None:
            return None
        return replace(snapshot, adapter_versions=self._adapters.versions(snapshot.adapters))

    def _write(self, cache: SequenceManager, snapshot: KvSnapshot) -> str | None:
        file = self._folder.write(self._origins[cache.name], snapshot)
        if file is not None:
            count, size = len(snapshot.tokens), snapshot.size >> 20
            log.info("saved KV of %d tokens of the cache %r: %d MiB", count, cache.name, size)
        return file

    def _mark_saved(self, cache: SequenceManager, slot: SequenceSlot, snapshot: KvSnapshot, file: str) -> None:
        older = cache.mark_saved(slot, snapshot, file)
        if older is not None:
            Path(older).unlink(missing_ok=True)

    def _read(self, cache: SequenceManager, file: Path) -> KvSnapshot | None:
        return self._folder.read(file, self._origins[cache.name], self._adapters.versions)

    def _restore(self, cache: SequenceManager, file: str, snapshot: KvSnapshot | None) -> None:
        # An adapter may have been unloaded since the file was read.
        if snapshot is None or self._adapters.versions(snapshot.adapters) != snapshot.adapter_versions:
            return
        if cache.adopt(snapshot, file) or cache.adopt_parked(snapshot, file):
            log.info("restored KV of %d tokens of the cache %r", len(snapshot.tokens), cache.name)
        else:
            self._note(cache, Path(file))


def _oldest_first(cache: SequenceManager) -> list[SequenceSlot]:
    """The most recently used sequence becomes the newest file."""
    return sorted(cache.slots, key=lambda slot: slot.use_order)


# --- the folder -------------------------------------------------------------------------------------------------------


class SnapshotFolder:
    """The snapshots of one model: one file per sequence, complete or absent. `limit` bytes hold for all models that
    share the root folder; the oldest files are deleted first. Files that do not fit the running engine stay."""

    def __init__(self, root: Path, model: str, limit: int) -> None:
        self.root, self.folder, self.limit = root, root / _slug(model), limit

    def files(self, cache: str) -> list[Path]:
        """The newest first."""
        return [file for file, _ in _newest_first(self.folder.glob(f"{_slug(cache)}-*.kv"))]

    def read(
        self, file: Path, origin: KvOrigin, versions: Callable[[AdapterSet], AdapterVersions]
    ) -> KvSnapshot | None:
        """None if it does not fit; the log says why."""
        return self._decoded(decode_snapshot, file, origin, versions)

    def read_leaf(
        self, file: Path, origin: KvOrigin, versions: Callable[[AdapterSet], AdapterVersions]
    ) -> StoredKv | None:
        """The same without the KV."""
        return self._decoded(decode_stored, file, origin, versions)

    def _decoded(
        self,
        decode: Callable[[BufferedReader, int, Callable[[SnapshotHeader], None]], T],
        file: Path,
        origin: KvOrigin,
        versions: Callable[[AdapterSet], AdapterVersions],
    ) -> T | None:
        def check(header: SnapshotHeader) -> None:
            wrong = origin_differences(header.origin, origin)
            if not wrong and versions(header.adapters) != header.adapter_versions:
                wrong = [f"adapters were {header.adapter_versions} and are {versions(header.adapters)}"]
            if wrong:
                raise SnapshotMismatch("; ".join(wrong))

        try:
            with file.open("rb") as data:
                return decode(data, os.fstat(data.fileno()).st_size, check)
        except (SnapshotMismatch, OSError) as error:
            log.warning("the saved KV in %s is ignored: %s", file, error)
            return None

    def write(self, origin: KvOrigin, snapshot: KvSnapshot, stem: str = "") -> str | None:
        """The new file; None if it cannot be written. With a `stem` of its own it is not restored by itself."""
        if snapshot.size > self.limit:
            log.warning(
                "the KV of %d tokens is not saved: it takes %d MiB and kv_store_mb is %d",
                len(snapshot.tokens),
                snapshot.size >> 20,
                self.limit >> 20,
            )
            return None
        stem = stem or f"{_slug(origin.cache)}-{secrets.token_hex(8)}"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self.root).free) < snapshot.size + _MIN_FREE:
                log.warning("the KV of the cache %r is not saved: the disk has %d MiB left", origin.cache, free >> 20)
                return None
            return self._write(snapshot.size, encode_snapshot(origin, snapshot), stem)
        except OSError as error:
            log.warning("the KV of the cache %r cannot be saved in %s: %s", origin.cache, self.folder, error)
            return None

    def _write(self, size: int, pieces: Iterator[Buffer], stem: str) -> str:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(size, stem)
        part, file = self.folder / f"{stem}.{os.getpid()}.part", self.folder / f"{stem}.kv"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as data:
                written = logged = 0
                for piece in pieces:
                    data.write(piece)
                    written += len(piece)
                    if written - logged >= _PROGRESS_BYTES:
                        log.info("saving KV to %s: %d of %d MiB", file, written >> 20, size >> 20)
                        logged = written
            self.touch(str(part))
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return str(file)

    def touch(self, file: str) -> bool:
        """Makes it the newest; False if it is gone. The file system's own time stamps are too coarse to order by."""
        now = time.time_ns()
        try:
            os.utime(file, ns=(now, now))
        except OSError:
            return False
        return True

    def _make_room(self, size: int, stem: str = "") -> None:
        """Deletes the oldest files until `size` bytes fit, and what dead processes left half written. The files that
        clients name take a quarter of the room for each scope: nobody can delete all of the others'."""
        for part in self.root.glob("*/*.part"):
            writer = re.search(r"\.(\d+)\.part$", part.name)
            if writer and not psutil.pid_exists(int(writer[1])):
                part.unlink(missing_ok=True)
        if stem.startswith(_NAMED):
            own = "-".join(stem.split("-")[:2])
            _delete_oldest(self.root.glob(f"*/{own}-*.kv"), self.limit // 4 - size)
        _delete_oldest(self.root.glob("*/*.kv"), self.limit - size)


def _delete_oldest(files: Iterator[Path], room: int) -> None:
    for file, held in _newest_first(files):
        room -= held
        if room < 0:
            log.info("deleting the saved KV in %s to make room", file)
            file.unlink(missing_ok=True)


def file_stem(scope: str, name: str) -> str:
    """Of a file that a client names: others cannot name it."""
    return f"{_NAMED}{_digest(scope)}-{_digest(name)}"


def _newest_first(files: Iterator[Path]) -> list[tuple[Path, int]]:
    """With their sizes. Another process may delete files meanwhile."""
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            stat = file.stat()
            found.append((stat.st_mtime_ns, file, stat.st_size))
    return [(file, size) for _, file, size in sorted(found, reverse=True)]


def _slug(name: str) -> str:
    """A unique name that any file system accepts."""
    return f"{re.sub(r'[^A-Za-z0-9._]+', '_', name)[:40].strip('.')}.{_digest(name, 4)}"


def _digest(name: str, size: int = 16) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
