"""Conversations, uploaded files, batches and background responses, in one SQLite file that several processes share.

The file is created by the first write: a server on which nobody uses these leaves nothing behind.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from modelyard.chat_store import default_path
from modelyard.core.errors import KeyLimited, NotFound, Unavailable
from modelyard.database import Database, DatabaseKind, DatabaseThread
from modelyard.store import StoreSettings, key_bytes

_SCHEMA = (
    "CREATE TABLE totals (objects INTEGER NOT NULL, bytes INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0, 0)",
    """CREATE TABLE objects (
        number INTEGER PRIMARY KEY AUTOINCREMENT, scope BLOB NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL,
        expires REAL, UNIQUE (scope, key)
    )""",
    "CREATE INDEX objects_in_order ON objects (scope, number)",
    "CREATE INDEX objects_by_expiry ON objects (expires) WHERE expires IS NOT NULL",
    """CREATE TRIGGER object_came AFTER INSERT ON objects BEGIN
        UPDATE totals SET objects = objects + 1, bytes = bytes + length(new.value);
    END""",
    """CREATE TRIGGER object_changed AFTER UPDATE OF value ON objects BEGIN
        UPDATE totals SET bytes = bytes + length(new.value) - length(old.value);
    END""",
    """CREATE TRIGGER object_left AFTER DELETE ON objects BEGIN
        UPDATE totals SET objects = objects - 1, bytes = bytes - length(old.value);
    END""",
)
# What each key has: `<kind>/<key>` begins the scope of its objects, and what belongs to no key has no "/". A file of an
# older version has no such table; it is made at the first write, and older versions keep it up to date.
_OWNER = """CASE instr({0}.scope, x'2f') WHEN 0 THEN x'' ELSE substr(
    substr({0}.scope, instr({0}.scope, x'2f') + 1), 1,
    instr(CAST(substr({0}.scope, instr({0}.scope, x'2f') + 1) || x'2f' AS BLOB), x'2f') - 1) END"""
_OWNED = f"SELECT {_OWNER.format('o')}, count(*), sum(length(o.value)) FROM objects o GROUP BY 1"  # noqa: S608
_MORE = (
    "CREATE TABLE shares (owner BLOB PRIMARY KEY, objects INTEGER NOT NULL, bytes INTEGER NOT NULL)",
    f"INSERT INTO shares {_OWNED}",
    *(
        f"""CREATE TRIGGER share_{name} AFTER {event} ON objects BEGIN
            INSERT INTO shares VALUES ({_OWNER.format(row)}, {objects}, {size})
            ON CONFLICT (owner) DO UPDATE SET objects = objects + excluded.objects, bytes = bytes + excluded.bytes;
        END"""  # noqa: S608  names of ours
        for name, event, row, objects, size in (
            ("grew", "INSERT", "new", 1, "length(new.value)"),
            ("changed", "UPDATE OF value", "new", 0, "length(new.value) - length(old.value)"),
            ("shrank", "DELETE", "old", -1, "-length(old.value)"),
        )
    ),
)
_HAS_SHARES = "SELECT count(*) FROM sqlite_master WHERE name = 'shares'"
_SHARE = "SELECT objects > ? OR bytes > ? FROM shares WHERE owner = ?"
_KIND = DatabaseKind(0x4D594F42, _SCHEMA, "the file of conversations, files and batches", "store.objects")
_GET = "SELECT value FROM objects WHERE scope = ? AND key = ? AND (expires IS NULL OR expires > ?)"
_PUT = """INSERT INTO objects (scope, key, value, expires) VALUES (?, ?, ?, ?) ON CONFLICT (scope, key)
    DO UPDATE SET value = excluded.value, expires = coalesce(excluded.expires, expires)"""
_DELETE = "DELETE FROM objects WHERE scope = ? AND key = ?"
# The scopes that begin with `<scope>/<key>/`: "0" is the byte after "/".
_DELETE_PARTS = "DELETE FROM objects WHERE scope = ? OR (scope > ? AND scope < ?)"
_EXPIRED = "SELECT scope, key FROM objects WHERE expires <= ? LIMIT 1000"
_NUMBER = "SELECT number FROM objects WHERE scope = ? AND key = ?"
_UP = """SELECT key, value FROM objects WHERE scope = ? AND number > ? AND (expires IS NULL OR expires > ?)
    ORDER BY number LIMIT ?"""
_DOWN = """SELECT key, value FROM objects WHERE scope = ? AND number < ? AND (expires IS NULL OR expires > ?)
    ORDER BY number DESC LIMIT ?"""
_FULL = "SELECT objects > ? OR bytes > ? FROM totals"
_NEWEST = (1 << 63) - 1
_SWEEP_S = 60.0  # between two searches for expired objects, if nothing is written


class SqliteObjectStore:
    def __init__(
        self,
        path: Path,
        max_objects: int,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        *,
        key_share: float = 1.0,
    ) -> None:
        """`key_share` is the part of it that one key may use."""
        self._max_objects, self._max_bytes, self._clock = max_objects, max_bytes, clock
        self._key_share, self._has_shares = key_share, False
        self._database = Database(path, _KIND)
        self._thread = DatabaseThread(self._database, "objects")
        self._swept = 0.0

    async def get(self, scope: str, key: str) -> bytes | None:
        return await self._thread.run(self._get, *key_bytes(scope, key))

    async def put(self, scope: str, key: str, value: bytes, ttl_s: float | None = None) -> None:
        await self._thread.run(self._put, *key_bytes(scope, key), value, ttl_s)

    async def swap(self, scope: str, key: str, old: bytes | None, new: bytes, ttl_s: float | None = None) -> bool:
        return await self._thread.run(self._swap, *key_bytes(scope, key), old, new, ttl_s)

    async def delete(self, scope: str, key: str) -> bool:
        return await self._thread.run(self._delete, *key_bytes(scope, key))

    async def page(
        self, scope: str, *, after: str = "", limit: int = 100, newest_first: bool = False, values: bool = True
    ) -> list[tuple[str, bytes]]:
        return await self._thread.run(self._page, *key_bytes(scope, after), limit, newest_first, values)

    async def close(self) -> None:
        await self._thread.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _get(self, scope: bytes, key: bytes) -> bytes | None:
        if self._database.is_absent:
            return None
        self._sweep()
        with self._database.opened() as db:
            row = db.execute(_GET, (scope, key, self._clock())).fetchone()
        return None if row is None else bytes(row[0])

    def _put(self, scope: bytes, key: bytes, value: bytes, ttl_s: float | None) -> None:
        with self._database.transaction() as db:
            self._write(db, scope, key, value, ttl_s)

    def _swap(self, scope: bytes, key: bytes, old: bytes | None, new: bytes, ttl_s: float | None) -> bool:
        if old is not None and self._database.is_absent:
            return False
        with self._database.transaction() as db:
            row = db.execute(_GET, (scope, key, self._clock())).fetchone()
            found = None if row is None else bytes(row[0])
            if found == old:
                self._write(db, scope, key, new, ttl_s)
        return found in (old, new)  # `new`: a message to the scheduler may arrive twice

    def _write(self, db: sqlite3.Connection, scope: bytes, key: bytes, value: bytes, ttl_s: float | None) -> None:
        now = self._clock()
        if not self._has_shares and not db.execute(_HAS_SHARES).fetchone()[0]:
            for statement in _MORE:
                db.execute(statement)
        self._has_shares = True
        self._expire(db, now)
        db.execute(_PUT, (scope, key, value, None if ttl_s is None else now + ttl_s))
        if db.execute(_FULL, (self._max_objects, self._max_bytes)).fetchone()[0]:
            raise Unavailable(
                f"the store of conversations, files and batches is full ({self._max_objects} objects, "
                f"{self._max_bytes} bytes): delete some, or set store.max_objects and store.max_object_bytes higher",
                code="store_full",
                retry_after=60.0,
            )

        if (owner := scope.partition(b"/")[2].partition(b"/")[0]) and self._key_share < 1:
            bounds = int(self._max_objects * self._key_share), int(self._max_bytes * self._key_share)
            if db.execute(_SHARE, (*bounds, owner)).fetchone()[0]:
                raise KeyLimited(
                    "the conversations, files and batches of this key would take more than its part of the store "
                    f"({bounds[0]} objects, {bounds[1]} bytes): delete some, or set store.key_share higher",
                    code="store_full",
                    retry_after=60.0,
                )

    def _delete(self, scope: bytes, key: bytes) -> bool:
        if self._database.is_absent:
            return False
        with self._database.transaction() as db:
            self._expire(db, self._clock())
            return self._remove(db, scope, key)

    def _remove(self, db: sqlite3.Connection, scope: bytes, key: bytes) -> bool:
        parts = scope + b"/" + key
        db.execute(_DELETE_PARTS, (parts, parts + b"/", parts + b"0"))
        return db.execute(_DELETE, (scope, key)).rowcount > 0

    def _sweep(self) -> None:
        """What has expired is also removed from the disk of a server that only reads."""
        if (now := self._clock()) - self._swept > _SWEEP_S:
            self._swept = now
            with self._database.transaction() as db:
                self._expire(db, now)

    def _expire(self, db: sqlite3.Connection, now: float) -> None:
        for scope, key in db.execute(_EXPIRED, (now,)).fetchall():
            self._remove(db, scope, key)

    def _page(
        self, scope: bytes, after: bytes, limit: int, newest_first: bool, values: bool
    ) -> list[tuple[str, bytes]]:
        if self._database.is_absent:
            return []
        self._sweep()
        with self._database.opened() as db:
            number = _NEWEST if newest_first else 0
            if after:
                row = db.execute(_NUMBER, (scope, after)).fetchone()
                if row is None:
                    raise NotFound(f"there is nothing after {after.decode('utf-8', 'replace')[:100]!r}: it is unknown")
                number = row[0]
            query = _DOWN if newest_first else _UP
            query = query if values else query.replace("key, value", "key, x''")
            rows = db.execute(query, (scope, number, self._clock(), limit)).fetchall()
        return [(key.decode("utf-8", "surrogatepass"), bytes(value)) for key, value in rows]


def objects_path() -> Path:
    """Beside the workbench's chats."""
    return default_path().with_name("objects.sqlite")


def open_object_store(settings: StoreSettings, default: Path) -> SqliteObjectStore:
    path, bounds = settings.objects or default, (settings.max_objects, settings.max_object_bytes)
    return SqliteObjectStore(path, *bounds, key_share=settings.key_share)
