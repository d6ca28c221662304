"""The object store: order, pages, exchanges, parts, expiry, bounds, several processes, and unusable files."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from modelyard.core.errors import KeyLimited, NotFound, Unavailable
from modelyard.object_store import SqliteObjectStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "objects.sqlite"


@pytest.fixture
def store(path: Path, clock: Clock) -> SqliteObjectStore:
    return SqliteObjectStore(path, max_objects=100, max_bytes=10_000, clock=clock)


def mode(path: Path) -> int | None:
    return path.stat().st_mode & 0o777 if path.exists() else None


async def test_reading_creates_no_file(store: SqliteObjectStore, path: Path) -> None:
    assert await store.get("files/ada", "a") is None
    assert await store.page("files/ada") == []
    assert not await store.delete("files/ada", "a")
    assert not await store.swap("files/ada", "a", b"old", b"new")
    assert mode(path) is None
    await store.put("files/ada", "a", b"1")
    assert mode(path) == 0o600
    await store.close()


async def test_pages_have_the_order_of_creation_whatever_changes_later(store: SqliteObjectStore) -> None:
    for key in ("c", "a", "d", "b"):
        await store.put("files/ada", key, key.encode())
    await store.put("files/ada", "c", b"changed")
    await store.put("files/bob", "x", b"another key's")
    assert await store.page("files/ada") == [("c", b"changed"), ("a", b"a"), ("d", b"d"), ("b", b"b")]
    assert await store.page("files/ada", after="a", limit=1) == [("d", b"d")]
    assert await store.page("files/ada", newest_first=True, limit=2, values=False) == [("b", b""), ("d", b"")]
    assert await store.page("files/ada", newest_first=True, after="d") == [("a", b"a"), ("c", b"changed")]
    with pytest.raises(NotFound, match="nobody"):
        await store.page("files/ada", after="nobody")


async def test_an_exchange_takes_place_only_if_nothing_changed(store: SqliteObjectStore) -> None:
    assert await store.swap("s", "k", None, b"1")
    assert not await store.swap("s", "k", None, b"2")
    assert await store.swap("s", "k", b"1", b"2")
    assert not await store.swap("s", "k", b"1", b"3")
    assert await store.swap("s", "k", b"1", b"2")  # a message that arrived twice
    assert await store.get("s", "k") == b"2"


async def test_parts_are_deleted_and_expire_with_their_object(store: SqliteObjectStore, clock: Clock) -> None:
    for key in ("f1", "f10"):
        await store.put("files/ada", key, b"", 10)
        await store.put(f"files/ada/{key}", "0", b"part")
        await store.put(f"files/ada/{key}/rows", "0", b"part of a part")
    assert await store.delete("files/ada", "f1")
    assert [await store.page(scope) for scope in ("files/ada/f1", "files/ada/f1/rows")] == [[], []]
    assert await store.page("files/ada/f10") == [("0", b"part")]
    clock.now += 11
    assert await store.get("files/ada", "f10") is None
    await store.put("other", "k", b"")
    assert [await store.page(scope) for scope in ("files/ada/f10", "files/ada/f10/rows")] == [[], []]


async def test_what_has_expired_leaves_the_disk_though_nothing_is_written(
    store: SqliteObjectStore, path: Path, clock: Clock
) -> None:
    await store.put("files/ada", "f", b"secret", 10)
    clock.now += 100
    assert await store.page("files/ada") == []
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM objects").fetchone() == (0,)


async def test_a_change_keeps_the_expiry_unless_it_has_one(store: SqliteObjectStore, clock: Clock) -> None:
    await store.put("s", "kept", b"1", 10)
    await store.put("s", "renewed", b"1", 10)
    clock.now += 8
    assert await store.swap("s", "kept", b"1", b"2")
    assert await store.swap("s", "renewed", b"1", b"1", 10)
    clock.now += 4
    assert (await store.get("s", "kept"), await store.get("s", "renewed")) == (None, b"1")
    assert await store.swap("s", "kept", None, b"3")


@pytest.mark.parametrize(("max_objects", "max_bytes"), [(2, 1000), (100, 20)])
async def test_a_full_store_refuses_and_loses_nothing(path: Path, max_objects: int, max_bytes: int) -> None:
    store = SqliteObjectStore(path, max_objects, max_bytes)
    await store.put("s", "1", b"x" * 10)
    await store.put("s", "2", b"x" * 10)
    with pytest.raises(Unavailable, match="full") as error:
        await store.put("s", "3", b"x")
    assert error.value.code == "store_full"
    assert [key for key, _ in await store.page("s")] == ["1", "2"]
    await store.delete("s", "1")
    await store.put("s", "3", b"x")


async def test_two_processes_share_a_file_and_one_of_them_wins(path: Path) -> None:
    stores = [SqliteObjectStore(path, 1000, 1 << 20) for _ in range(2)]

    async def claim(store: SqliteObjectStore, name: bytes) -> int:
        return sum([await store.swap("open", f"{n}", None, name) for n in range(50)])

    won = await asyncio.gather(claim(stores[0], b"first"), claim(stores[1], b"second"))
    assert sum(won) == 50
    assert len(await stores[1].page("open")) == 50
    for store in stores:
        await store.close()


async def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"store\.objects") as error:
        await SqliteObjectStore(tmp_path, 10, 10).put("s", "k", b"")  # a folder
    assert error.value.code == "store_unusable"


# --- the share of a key -----------------------------------------------------------------------------------------------


async def test_one_key_has_its_part_of_the_store_and_what_it_deletes_is_free_again(path: Path, clock: Clock) -> None:
    store = SqliteObjectStore(path, max_objects=10, max_bytes=10_000, clock=clock, key_share=0.5)
    await store.put("files/ada", "a", b"x" * 3000)
    await store.put("files/ada/a", "part", b"x" * 1900, ttl_s=10)
    for scope in ("files/ada", "conversations/ada/c"):
        with pytest.raises(KeyLimited, match="part of the store") as refused:
            await store.put(scope, "b", b"x" * 200)
        assert refused.value.code == "store_full"
    await store.put("files/bob", "a", b"x" * 4900)
    clock.now += 20
    await store.put("files/ada", "b", b"x" * 1900)
    await store.put("files/ada", "b", b"")
    for name in "cde":
        await store.put("files/ada", name, b"")
    with pytest.raises(KeyLimited):
        await store.put("files/ada", "f", b"")
    await store.delete("files/ada", "c")
    await store.put("files/ada", "f", b"")
    await store.close()


async def test_what_belongs_to_no_key_and_a_server_without_keys_have_the_whole_store(path: Path, clock: Clock) -> None:
    store = SqliteObjectStore(path, max_objects=10, max_bytes=10_000, clock=clock, key_share=0.1)
    for scope in ("owners", "files/", "files//file-1"):
        await store.put(scope, "a", b"x" * 3000)
    with pytest.raises(Unavailable, match="is full"):
        await store.put("files/", "b", b"x" * 3000)
    await store.close()


async def test_a_file_of_an_older_version_is_counted_when_it_is_opened(path: Path, clock: Clock) -> None:
    store = SqliteObjectStore(path, max_objects=10, max_bytes=10_000, clock=clock)
    await store.put("files/ada", "a", b"x" * 4000)
    await store.close()
    with sqlite3.connect(path) as db:
        for statement in ("TABLE shares", "TRIGGER share_grew", "TRIGGER share_changed", "TRIGGER share_shrank"):
            db.execute(f"DROP {statement}")
    db.close()
    store = SqliteObjectStore(path, max_objects=10, max_bytes=10_000, clock=clock, key_share=0.5)
    with pytest.raises(KeyLimited):
        await store.put("files/ada", "b", b"x" * 2000)
    await store.close()
