from __future__ import annotations

import asyncio
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

from modelyard.core.errors import Unavailable
from modelyard.store import SqliteStore

_WRITER = """
import asyncio, sys
from pathlib import Path
from modelyard.store import SqliteStore
async def main(path, who):
    store = SqliteStore(Path(path), 50, 10_000, 60)
    for n in range(40):
        await store.put(who, str(n % 10), f"{who} {n}".encode())
        assert (await store.get(who, str(n % 10)) or b"").startswith(who.encode())
    await store.close()
asyncio.run(main(*sys.argv[1:]))
"""


def _open(path: Path) -> SqliteStore:
    return SqliteStore(path, 100, 10_000, 60)


def _modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


async def test_a_second_connection_of_a_process_leaves_the_locks_of_the_first(tmp_path: Path) -> None:
    """Without its lock another process would take itself for the last one, and remove the log of the first."""
    first = _open(tmp_path / "s.db")
    await first.put("s", "k", b"v")
    await _open(tmp_path / "s.db").close()
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", _WRITER, str(tmp_path / "s.db"), "w")
    assert await other.wait() == 0
    assert (tmp_path / "s.db-wal").exists()
    await first.put("s", "l", b"w")
    assert [await first.get("s", key) for key in ("k", "l")] == [b"v", b"w"]
    await first.close()


async def test_entries_survive_reopening(tmp_path: Path) -> None:
    first = _open(tmp_path / "s.db")
    await first.put("s", "k", b"v")
    await first.close()
    second = _open(tmp_path / "s.db")
    assert await second.get("s", "k") == b"v"
    await second.close()


async def test_files_are_readable_for_their_owner_only(tmp_path: Path) -> None:
    store = _open(tmp_path / "s.db")
    await store.put("s", "k", b"v")
    modes = _modes(tmp_path)
    await store.close()
    assert modes == {"s.db": 0o600, "s.db-wal": 0o600, "s.db-shm": 0o600}


async def test_several_processes_create_and_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    writers = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _WRITER, str(path), who, cwd=Path.cwd())
        for who in ("a", "b", "c")
    ]
    assert [await writer.wait() for writer in writers] == [0, 0, 0]
    store = _open(path)
    assert [await store.get(who, "9") for who in "abc"] == [b"a 39", b"b 39", b"c 39"]
    await store.close()
    db = sqlite3.connect(path)
    totals = db.execute("SELECT entries, bytes FROM totals").fetchone()
    counted = db.execute("SELECT count(*), sum(size) FROM entries").fetchone()
    db.close()
    assert totals == counted


def test_a_corrupt_file_is_an_error_and_stays_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    for content in (b"this is a text file, and a rather long one at that" * 50, b"SQLite format 3\0junk"):
        path.write_bytes(content)
        with pytest.raises(Unavailable, match=r"s\.db, cannot be used: .*Move it away, or set store\.path") as caught:
            _open(path)
        assert caught.value.code == "store_unusable"
        assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "s.db")
    db.execute("CREATE TABLE songs (title TEXT)")
    db.close()
    with pytest.raises(Unavailable, match="the database of another program"):
        _open(tmp_path / "s.db")


async def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    await _open(tmp_path / "s.db").close()
    db = sqlite3.connect(tmp_path / "s.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(Unavailable, match="it has format 99"):
        _open(tmp_path / "s.db")


def test_a_folder_instead_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be used"):
        _open(tmp_path)


async def test_a_failed_statement_is_an_error_and_the_store_recovers(tmp_path: Path) -> None:
    store = _open(tmp_path / "s.db")
    other = sqlite3.connect(tmp_path / "s.db")
    other.execute("ALTER TABLE totals RENAME TO hidden")
    with pytest.raises(Unavailable, match="cannot be used"):
        await store.put("s", "k", b"v")
    other.execute("ALTER TABLE hidden RENAME TO totals")
    other.close()
    await store.put("s", "k", b"v")
    assert await store.get("s", "k") == b"v"
    await store.close()
