from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from modelyard.core.store import Store
from modelyard.store import MemoryStore, SqliteStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


StoreFactory = Callable[..., Store]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
async def make_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[StoreFactory]:
    opened: list[Store] = []

    def make_store(max_entries: int = 100, max_bytes: int = 10_000, ttl_s: float = 60) -> Store:
        bounds = (max_entries, max_bytes, ttl_s, clock)
        opened.append(
            MemoryStore(*bounds) if request.param == "memory" else SqliteStore(tmp_path / "a" / "store.db", *bounds)
        )
        return opened[-1]

    yield make_store
    for store in opened:
        await store.close()
