"""SQLite files, which several processes may share: created with their schema, in WAL mode, private to the user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from msgspec import Struct

from modelyard.core.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")

_FORMAT_VERSION = 1
_LOCK_TIMEOUT_S = 10.0  # to wait for another process that has locked the file


class DatabaseKind(Struct, frozen=True):
    """What a file contains. `application` is SQLite's `application_id` of it; `title` and `setting` name it in errors.

    The schema is single statements: `executescript` would commit the transaction.
    """

    application: int
    schema: tuple[str, ...]
    title: str
    setting: str


class Database:
    """A file that is opened, and created, at the first use. Synchronous, used by one thread."""

    def __init__(self, path: Path, kind: DatabaseKind) -> None:
        self.path, self._kind = path, kind
        self._db: sqlite3.Connection | None = None

    @property
    def is_absent(self) -> bool:
        return self._db is None and not self.path.exists()

    @contextlib.contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._db is None:
                self._db = _open(self.path, self._kind)
            yield self._db
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                f"{self._kind.title}, {self.path}, cannot be used: {error}. "
                f"Move it away, or set {self._kind.setting} to another file.",
                code="store_unusable",
            ) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """IMMEDIATE: a transaction that goes from reading to writing fails at once if another process writes."""
        with self.opened() as db, _transaction(db):
            yield db

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


class DatabaseThread:
    """Owns the database of a store, so that the event loop never waits for the disk."""

    def __init__(self, database: Database, name: str) -> None:
        self._database, self._thread = database, ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._thread.submit(call, *args, **kwargs))

    def run_blocking(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()

    async def close(self) -> None:
        await self.run(self._database.close)
        self.stop()

    def stop(self) -> None:
        self._thread.shutdown(wait=False)


def _open(path: Path, kind: DatabaseKind) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Conversations are private, and SQLite would apply the umask. A file that exists is not opened here: closing it
    # would release the locks that other connections of this process hold.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    db = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
    try:
        _prepare(db, kind.application, kind.schema)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, application: int, schema: Sequence[str]) -> None:
    with _transaction(db):
        is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        marks = (f"PRAGMA application_id = {application}", f"PRAGMA user_version = {_FORMAT_VERSION}")
        for statement in (*schema, *marks) if is_new else ():
            db.execute(statement)
        (program,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    if program != application:
        raise sqlite3.DatabaseError("it is the database of another program")
    if version != _FORMAT_VERSION:
        raise sqlite3.DatabaseError(f"it has format {version}, and this version of Modelyard reads {_FORMAT_VERSION}")
    _use_wal(db)


def _use_wal(db: sqlite3.Connection) -> None:
    """In WAL mode readers do not wait for a writer. SQLite's lock timeout does not cover the switch, so retry."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    db.execute("PRAGMA synchronous = NORMAL")


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if db.in_transaction:  # a full disk has rolled back already; keep its error
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
