"""The file of created keys and of the usage of all keys: SQLite, shared by the processes of a server.

Secrets are not in it, only their SHA-256. Everything here is synchronous and used by one thread.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from modelyard.accounts.keys import Key, KeyLogin, make_key
from modelyard.accounts.settings import AccountSettings, KeyRules
from modelyard.accounts.usage import UsageCounts, UsageKey
from modelyard.core.errors import Conflict, NotFound
from modelyard.database import Database, DatabaseKind
from modelyard.library.cache_dir import data_dir

_SCHEMA = (
    """CREATE TABLE keys (
        id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, digest BLOB NOT NULL UNIQUE, hint TEXT NOT NULL,
        created REAL NOT NULL, revoked REAL, rules TEXT NOT NULL
    )""",
    """CREATE TABLE usage (
        day INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
        failed INTEGER NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL,
        reasoning INTEGER NOT NULL, cost REAL NOT NULL, last REAL NOT NULL, PRIMARY KEY (day, key, model)
    ) WITHOUT ROWID""",
    "CREATE INDEX usage_by_key ON usage (key, day)",
)
# What requests that run hold of budgets, by the process that runs them. Files of earlier versions have no such table.
_HOLDS = """CREATE TABLE IF NOT EXISTS holds (
    process TEXT NOT NULL, id INTEGER NOT NULL, key TEXT NOT NULL, tokens INTEGER NOT NULL, cost REAL NOT NULL,
    seen REAL NOT NULL, PRIMARY KEY (process, id)
) WITHOUT ROWID"""
# Browsers that have sent a key: KeyLogin. Files of earlier versions have no such table either.
_LOGINS = "CREATE TABLE IF NOT EXISTS logins (digest BLOB PRIMARY KEY, key BLOB NOT NULL, until REAL NOT NULL)"
_HAS_LOGINS = "SELECT 1 FROM sqlite_master WHERE name = 'logins'"
_MAX_LOGINS = 50  # of a key: the oldest ones end
_FORGET_LOGINS = """DELETE FROM logins WHERE until < ? OR key = ? AND digest NOT IN
    (SELECT digest FROM logins WHERE key = ? ORDER BY until DESC LIMIT ?)"""
_LOST_S = 30.0  # a process that is not seen for so long has died: what it held is free
_KIND = DatabaseKind(0x4D594143, _SCHEMA, "the file of keys and usage", "accounts.path")
_COUNTS = UsageCounts.__struct_fields__
_SUMS = ", ".join(f"sum({name})" for name in _COUNTS[:-1]) + ", max(last)"
_ADD = f"""INSERT INTO usage VALUES ({", ".join("?" * (3 + len(_COUNTS)))})
    ON CONFLICT (day, key, model) DO UPDATE SET
    {", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS[:-1])}, last = max(last, excluded.last)"""  # noqa: S608  names of ours


def default_path(env: Mapping[str, str] = os.environ) -> Path:
    return data_dir(env) / "accounts.sqlite"


# From tokens and cost that are used and held: what a request may have, and the tokens and cost of that.
Reserve = Callable[[int, float, int, float], tuple[int, int, float]]


class AccountsFile:
    """Created at the first write: a server whose keys are all in its configuration needs none until it has usage."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _KIND)
        self._has_held = False  # since this process began

    @classmethod
    def of(cls, settings: AccountSettings) -> AccountsFile:
        return cls(settings.path or default_path())

    def close(self) -> None:
        self._database.close()

    # --- keys ---------------------------------------------------------------------------------------------------------

    def all_keys(self) -> list[Key]:
        """All created keys, revoked ones too, oldest first."""
        if self._database.is_absent:
            return []
        with self._database.opened() as db:
            rows = db.execute("SELECT id, name, digest, hint, created, revoked, rules FROM keys ORDER BY created, id")
            return [_key(row) for row in rows]

    def add(self, key: Key) -> None:
        row = (key.id, key.name, key.digest, key.hint, key.created, key.revoked, _rules(key))
        with self._database.transaction() as db:
            try:
                db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                raise name_taken(key.name) from None

    def logins(self) -> list[KeyLogin]:
        if self._database.is_absent:
            return []
        with self._database.opened() as db:
            has_logins = db.execute(_HAS_LOGINS).fetchone() is not None
            rows = db.execute("SELECT digest, key, until FROM logins").fetchall() if has_logins else []
        return [KeyLogin(bytes(digest), bytes(key), until) for digest, key, until in rows]

    def add_login(self, login: KeyLogin, now: float) -> None:
        with self._database.transaction() as db:
            db.execute(_LOGINS)
            db.execute("INSERT INTO logins VALUES (?, ?, ?)", (login.digest, login.key, login.until))
            db.execute(_FORGET_LOGINS, (now, login.key, login.key, _MAX_LOGINS))

    def remove_login(self, digest: bytes) -> None:
        with self._database.transaction() as db:
            db.execute(_LOGINS)
            db.execute("DELETE FROM logins WHERE digest = ?", (digest,))

    def update(self, id: str, rules: KeyRules) -> None:
        self._change(id, "UPDATE keys SET rules = ? WHERE id = ? AND revoked IS NULL", rules.model_dump_json())

    def revoke(self, id: str, at: float) -> None:
        self._change(id, "UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL", at)

    def _change(self, id: str, statement: str, value: str | float) -> None:
        with self._database.transaction() as db:
            if not db.execute(statement, (value, id)).rowcount:
                raise key_not_found(id)

    # --- usage --------------------------------------------------------------------------------------------------------

    def add_usage(
        self, rows: Mapping[UsageKey, UsageCounts], process: str = "", ended: Sequence[int] = (), now: float = 0.0
    ) -> None:
        """In the same moment what the `ended` requests held is free, and what the process still holds is seen."""
        if not rows and not self._has_held:
            return
        with self._database.transaction() as db:
            values = ((*at, *(getattr(counts, name) for name in _COUNTS)) for at, counts in rows.items())
            db.executemany(_ADD, values)
            if self._has_held:
                db.executemany("DELETE FROM holds WHERE process = ? AND id = ?", ((process, id) for id in ended))
                db.execute("UPDATE holds SET seen = ? WHERE process = ?", (now, process))

    # --- budgets ------------------------------------------------------------------------------------------------------

    def hold(self, process: str, id: int, since: int, key: str, reserve: Reserve, now: float) -> tuple[int, int, float]:
        """What `reserve` finds room for beside all that processes have used and hold of the key's budget. One process
        at a time."""
        with self._database.transaction() as db:
            if not self._has_held:
                db.execute(_HOLDS)
            db.execute("DELETE FROM holds WHERE seen < ?", (now - _LOST_S,))
            query = f"SELECT {_SUMS} FROM usage WHERE key = ? AND day >= ?"  # noqa: S608  column names of ours
            used = _counts(db.execute(query, (key, since)).fetchone())
            held = db.execute("SELECT total(tokens), total(cost) FROM holds WHERE key = ?", (key,)).fetchone()
            found = reserve(used.prompt + used.output, used.cost, int(held[0]), held[1])
            db.execute("INSERT INTO holds VALUES (?, ?, ?, ?, ?, ?)", (process, id, key, found[1], found[2], now))
        self._has_held = True
        return found

    def free_all(self, process: str) -> None:
        """The process ends."""
        if self._has_held:
            with self._database.transaction() as db:
                db.execute("DELETE FROM holds WHERE process = ?", (process,))

    def usage_since(self, periods: Mapping[str, int]) -> dict[str, tuple[int, UsageCounts]]:
        """The usage of each of these keys, from its day on."""
        if not periods or self._database.is_absent:
            return {}
        query = f"SELECT {_SUMS} FROM usage WHERE key = ? AND day >= ?"  # noqa: S608  column names of ours
        with self._database.opened() as db:
            return {
                name: (since, _counts(db.execute(query, (name, since)).fetchone())) for name, since in periods.items()
            }

    def usage(
        self, by: Sequence[str], first: int, last: int, key: str | None = None, model: str | None = None
    ) -> list[tuple[tuple[int | str, ...], UsageCounts]]:
        """Sums of the days from `first` to `last`, grouped by these columns and in their order."""
        if self._database.is_absent:
            return []
        columns = "".join(f"{name}, " for name in by)
        group = f" GROUP BY {', '.join(by)} ORDER BY {', '.join(by)}" if by else ""
        query = f"SELECT {columns}{_SUMS} FROM usage WHERE day BETWEEN ? AND ?"  # noqa: S608  column names of ours
        values: list[int | str] = [first, last]
        for column, value in (("key", key), ("model", model)):
            if value is not None:
                query += f" AND {column} = ?"
                values.append(value)
        with self._database.opened() as db:
            rows = db.execute(query + group, values).fetchall()
        return [(row[: len(by)], _counts(row[len(by) :])) for row in rows if row[len(by)] is not None]


def has_created_keys(settings: AccountSettings) -> bool:
    file = AccountsFile.of(settings)
    try:
        return any(key.revoked is None for key in file.all_keys())
    finally:
        file.close()


def _key(row: tuple[str, str, bytes, str, float, float | None, str]) -> Key:
    id, name, digest, hint, created, revoked, rules = row
    read = KeyRules.model_validate_json(rules)
    return make_key(id, name, bytes(digest), read, hint=hint, created=created, revoked=revoked)


def _rules(key: Key) -> str:
    return key.rules().model_dump_json()


def _counts(row: Sequence[int | float | None]) -> UsageCounts:
    return UsageCounts(*(value or 0 for value in row))  # type: ignore[arg-type]


def name_taken(name: str) -> Conflict:
    return Conflict(
        f"there is, or was, a key named {name!r}. Its stored responses belong to the name: choose another one",
        code="key_exists",
        param="name",
    )


def key_not_found(id: str) -> NotFound:
    return NotFound(f"there is no key {id!r}; GET /v1/admin/keys lists them", code="key_not_found")
