"""The contract of all stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from modelyard.core.errors import TooLarge
from modelyard.store import MemoryStore, SqliteStore, StoreSettings, open_store
from tests.store.conftest import Clock, StoreFactory


async def test_get_returns_what_was_put(make_store: StoreFactory) -> None:
    store = make_store()
    await store.put("key-1", "resp_1", b"\x00hello")
    assert await store.get("key-1", "resp_1") == b"\x00hello"
    assert await store.get("key-1", "resp_2") is None


async def test_scopes_are_isolated(make_store: StoreFactory) -> None:
    store = make_store()
    await store.put("a", "x", b"mine")
    assert await store.get("b", "x") is None
    assert not await store.delete("b", "x")
    await store.put("b", "x", b"yours")
    assert await store.get("a", "x") == b"mine"


async def test_scope_and_key_are_not_concatenated(make_store: StoreFactory) -> None:
    store = make_store()
    await store.put("ab", "c", b"1")
    assert await store.get("a", "bc") is None


async def test_a_second_put_replaces_the_first(make_store: StoreFactory) -> None:
    store = make_store(max_entries=1)
    await store.put("s", "k", b"old")
    await store.put("s", "k", b"new")
    assert await store.get("s", "k") == b"new"


async def test_delete_returns_whether_an_entry_existed(make_store: StoreFactory) -> None:
    store = make_store()
    await store.put("s", "k", b"v")
    assert await store.delete("s", "k")
    assert not await store.delete("s", "k")
    assert await store.get("s", "k") is None


async def test_the_least_recently_used_entry_is_evicted(make_store: StoreFactory) -> None:
    store = make_store(max_entries=2)
    await store.put("s", "a", b"1")
    await store.put("s", "b", b"2")
    await store.get("s", "a")
    await store.put("s", "c", b"3")
    assert [await store.get("s", k) for k in "abc"] == [b"1", None, b"3"]


async def test_bytes_are_bounded_including_keys(make_store: StoreFactory) -> None:
    store = make_store(max_bytes=30)
    await store.put("s", "a", bytes(10))
    await store.put("s", "b", bytes(10))
    await store.put("s", "c", bytes(10))
    assert [await store.get("s", k) for k in "abc"] == [None, bytes(10), bytes(10)]


async def test_a_value_larger_than_the_store_is_refused_and_evicts_no_other(make_store: StoreFactory) -> None:
    store = make_store(max_bytes=30)
    await store.put("s", "a", b"small")
    await store.put("s", "b", b"old")
    with pytest.raises(TooLarge, match=r"store\.max_bytes, now 30"):
        await store.put("s", "b", bytes(31))
    assert await store.get("s", "a") == b"small"
    assert await store.get("s", "b") is None


async def test_an_entry_expires_even_if_it_was_read(make_store: StoreFactory, clock: Clock) -> None:
    store = make_store(ttl_s=60)
    await store.put("s", "k", b"v")
    clock.now += 59
    assert await store.get("s", "k") == b"v"
    clock.now += 1
    assert await store.get("s", "k") is None
    assert not await store.delete("s", "k")


async def test_any_text_can_be_a_key(make_store: StoreFactory) -> None:
    store = make_store()
    for key in ("", "ü/…", "\x00", "\ud800", "'; DROP TABLE entries; --"):
        await store.put(key, key, b"v")
        assert await store.get(key, key) == b"v"


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "delete"]), st.sampled_from("ab"), st.sampled_from("xy"), st.binary()
    ),
    min_size=8,
    max_size=20,
)


@given(_STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_both_stores_behave_alike(tmp_path: Path, steps: list[tuple[str, str, str, bytes]]) -> None:
    memory = MemoryStore(2, 40, 60)
    file = SqliteStore(tmp_path / "same.db", 2, 40, 60)
    for scope in "ab":
        for key in "xy":
            await file.delete(scope, key)  # of the previous example
    for op, scope, key, value in steps:
        args = (scope, key, value) if op == "put" else (scope, key)
        assert await _outcome(memory, op, args) == await _outcome(file, op, args)
    await file.close()


async def _outcome(store: MemoryStore | SqliteStore, op: str, args: tuple[object, ...]) -> object:
    try:
        return await getattr(store, op)(*args)
    except TooLarge as error:
        return error.message


async def test_the_settings_select_the_store(tmp_path: Path) -> None:
    assert StoreSettings().backend == "memory"
    for backend, kind in (("memory", MemoryStore), ("sqlite", SqliteStore)):
        store = open_store(StoreSettings.model_validate({"backend": backend, "path": tmp_path / "s.db"}))
        assert isinstance(store, kind)
        await store.close()


def test_a_path_alone_selects_sqlite() -> None:
    assert StoreSettings.model_validate({"path": "x.db"}).backend == "sqlite"


def test_sqlite_requires_a_path() -> None:
    with pytest.raises(ValidationError, match='backend "sqlite" needs path'):
        StoreSettings.model_validate({"backend": "sqlite"})
    assert str(StoreSettings.model_validate({"backend": "sqlite", "path": "x.db"}).path) == "x.db"


# --- memory -----------------------------------------------------------------------------------------------------------


async def test_the_byte_count_returns_to_zero() -> None:
    store = MemoryStore(10, 20, 60)
    for key in ("a", "b", "c"):
        await store.put("s", key, bytes(8))
        await store.put("s", key, bytes(6))
    for key in ("a", "b", "c"):
        await store.delete("s", key)
    await store.put("s", "k", bytes(18))
    assert await store.get("s", "k") == bytes(18)


async def test_a_closed_memory_store_is_empty() -> None:
    store = MemoryStore(10, 100, 60)
    await store.put("s", "k", b"v")
    await store.close()
    assert await store.get("s", "k") is None
