"""Data kept between requests (stored responses, replay memory): bounded, and scoped by API key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelyard.core.errors import TooLarge
from modelyard.core.store import Store
from modelyard.database import Database, DatabaseKind, DatabaseThread


class StoreSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    backend: Literal["memory", "sqlite"] = Field(
        default="memory",
        description="Where entries are kept: in this process, or in a file that survives it and can be shared. With "
        "`path` the default is `sqlite`.",
    )
    path: Path | None = Field(default=None, description='The database file; required by the "sqlite" backend.')
    max_entries: int = Field(
        default=10_000, gt=0, description="Entries kept; least recently used ones are dropped first."
    )
    max_bytes: int = Field(
        default=256 * 1024**2, gt=0, description="Bytes kept; least recently used entries are dropped first."
    )
    ttl_s: float = Field(default=86_400, gt=0, description="Seconds after which an entry expires.")
    chats: Path | None = Field(
        default=None,
        description="The file of the workbench's chats; by default chats.sqlite in the user's folder for data.",
    )
    objects: Path | None = Field(
        default=None,
        description="The file of conversations, uploaded files, batches and background responses; by default "
        "objects.sqlite in the user's folder for data. Nothing in it is evicted: when it is full, requests are "
        "refused.",
    )
    max_objects: int = Field(
        default=1_000_000,
        gt=0,
        description="Objects in that file; each item of a conversation and each line of a batch counts.",
    )
    max_object_bytes: int = Field(default=4 * 1024**3, gt=0, description="Bytes of all objects in that file.")
    key_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="The part of max_objects and max_object_bytes that one API key may use.",
    )
    object_ttl_s: float = Field(
        default=30 * 86_400,
        gt=0,
        description="Seconds after which uploaded files, batches, background responses and conversations that are not "
        "used any more expire. Clients can ask for less.",
    )

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.path is not None and "backend" not in self.model_fields_set:
            self.backend = "sqlite"
        if self.backend == "sqlite" and self.path is None:
            raise ValueError('backend "sqlite" needs path, the file to keep entries in')
        return self


_Key = tuple[str, str]  # scope, key


def _too_large(size: int, limit: int) -> TooLarge:
    """It would evict all other entries and then itself."""
    return TooLarge(f"an entry of {size} bytes does not fit into the store: set store.max_bytes, now {limit}, higher")


class MemoryStore:
    """In the memory of this process: lost when it exits, not shared with other processes. Drops the least recently used
    entries first. An entry expires `ttl_s` after it was put."""

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries, self._max_bytes, self._ttl, self._clock = max_entries, max_bytes, ttl_s, clock
        self._entries: OrderedDict[_Key, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    async def get(self, scope: str, key: str) -> bytes | None:
        full_key = (scope, key)
        found = self._entries.get(full_key)
        if found is None:
            return None
        value, expires = found
        if expires <= self._clock():
            self._drop(full_key)
            return None
        self._entries.move_to_end(full_key)
        return value

    async def put(self, scope: str, key: str, value: bytes) -> None:
        full_key, size = (scope, key), len(scope) + len(key) + len(value)
        self._drop(full_key)
        if size > self._max_bytes:
            raise _too_large(size, self._max_bytes)
        self._entries[full_key] = (value, self._clock() + self._ttl)
        self._bytes += size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    async def delete(self, scope: str, key: str) -> bool:
        found = self._entries.get((scope, key))
        self._drop((scope, key))
        return found is not None and found[1] > self._clock()

    async def close(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def _drop(self, full_key: _Key) -> None:
        found = self._entries.pop(full_key, None)
        if found is not None:
            self._bytes -= len(full_key[0]) + len(full_key[1]) + len(found[0])


# --- sqlite ---------------------------------------------------------------------------------------------------------

# `tick` orders the entries by use; the clocks of several processes could not.
_SCHEMA = (
    "CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL, tick INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0, 0, 0)",
    """CREATE TABLE entries (
        scope BLOB NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL,
        size INTEGER NOT NULL, used INTEGER NOT NULL, expires REAL NOT NULL, PRIMARY KEY (scope, key)
    )""",
    "CREATE INDEX entries_by_use ON entries (used)",
    "CREATE INDEX entries_by_expiry ON entries (expires)",
    """CREATE TRIGGER entry_came AFTER INSERT ON entries BEGIN
        UPDATE totals SET entries = entries + 1, bytes = bytes + new.size;
    END""",
    """CREATE TRIGGER entry_left AFTER DELETE ON entries BEGIN
        UPDATE totals SET entries = entries - 1, bytes = bytes - old.size;
    END""",
)
_KIND = DatabaseKind(0x4D595244, _SCHEMA, "the store file", "store.path")
_USE = "UPDATE totals SET tick = tick + 1"
_TOUCH = "UPDATE entries SET used = (SELECT tick FROM totals) WHERE scope = ? AND key = ?"
_GET = "SELECT value FROM entries WHERE scope = ? AND key = ? AND expires > ?"
_PUT = "INSERT INTO entries VALUES (?, ?, ?, ?, (SELECT tick FROM totals), ?)"
_DELETE = "DELETE FROM entries WHERE scope = ? AND key = ?"
_EXPIRE = "DELETE FROM entries WHERE expires <= ?"
_EVICT = "DELETE FROM entries WHERE rowid = (SELECT rowid FROM entries ORDER BY used LIMIT 1)"
_FULL = "SELECT entries > ? OR bytes > ? FROM totals"


class _Entries:
    """All statements on the file. Synchronous, used by one thread."""

    def __init__(
        self, database: Database, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._database, self._max_entries, self._max_bytes = database, max_entries, max_bytes
        self._ttl, self._clock = ttl_s, clock

    def check(self) -> None:
        """Open the file."""
        with self._database.opened():
            pass

    def get(self, scope: str, key: str) -> bytes | None:
        full_key = key_bytes(scope, key)
        with self._database.opened() as db:
            row = db.execute(_GET, (*full_key, self._clock())).fetchone()
        if row is None:
            return None
        with self._database.transaction() as db:
            db.execute(_USE)
            db.execute(_TOUCH, full_key)
        return bytes(row[0])

    def put(self, scope: str, key: str, value: bytes) -> None:
        full_key, size, now = key_bytes(scope, key), len(scope) + len(key) + len(value), self._clock()
        if size > self._max_bytes:
            self.delete(scope, key)
            raise _too_large(size, self._max_bytes)
        with self._database.transaction() as db:
            db.execute(_EXPIRE, (now,))
            db.execute(_DELETE, full_key)
            db.execute(_USE)
            db.execute(_PUT, (*full_key, value, size, now + self._ttl))
            while db.execute(_FULL, (self._max_entries, self._max_bytes)).fetchone()[0]:
                db.execute(_EVICT)

    def delete(self, scope: str, key: str) -> bool:
        with self._database.transaction() as db:
            db.execute(_EXPIRE, (self._clock(),))
            return db.execute(_DELETE, key_bytes(scope, key)).rowcount > 0


def key_bytes(scope: str, key: str) -> tuple[bytes, bytes]:
    """As bytes: a key may come from a client's path, and SQLite text cannot hold lone surrogates."""
    return scope.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass")


class SqliteStore:
    """In one file: it survives the process, and several gateway processes may share it.

    Totals and order are in the file and are updated by triggers in the transaction of the entries, so that all
    processes apply the same bounds.
    """

    def __init__(
        self, path: Path, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        database = Database(path, _KIND)
        self._thread = DatabaseThread(database, "store")
        self._entries = _Entries(database, max_entries, max_bytes, ttl_s, clock)
        try:
            self._thread.run_blocking(self._entries.check)
        except BaseException:
            self._thread.stop()
            raise

    async def get(self, scope: str, key: str) -> bytes | None:
        return await self._thread.run(self._entries.get, scope, key)

    async def put(self, scope: str, key: str, value: bytes) -> None:
        await self._thread.run(self._entries.put, scope, key, value)

    async def delete(self, scope: str, key: str) -> bool:
        return await self._thread.run(self._entries.delete, scope, key)

    async def close(self) -> None:
        await self._thread.close()


def open_store(settings: StoreSettings) -> Store:
    """Open the configured store. It may wait for a disk: call it before the server starts."""
    bounds = (settings.max_entries, settings.max_bytes, settings.ttl_s)
    if settings.backend == "sqlite" and settings.path is not None:  # the settings require a path
        return SqliteStore(settings.path, *bounds)
    return MemoryStore(*bounds)
