"""What is particular to the store in memory."""

from __future__ import annotations

from modelyard.store.memory import MemoryStore


async def test_the_account_of_bytes_returns_to_zero() -> None:
    store = MemoryStore(10, 20, 60)
    for key in ("a", "b", "c"):
        await store.put("s", key, bytes(8))
        await store.put("s", key, bytes(6))
    for key in ("a", "b", "c"):
        await store.delete("s", key)
    await store.put("s", "k", bytes(18))
    assert await store.get("s", "k") == bytes(18)


async def test_a_closed_store_holds_nothing() -> None:
    store = MemoryStore(10, 100, 60)
    await store.put("s", "k", b"v")
    await store.close()
    assert await store.get("s", "k") is None
