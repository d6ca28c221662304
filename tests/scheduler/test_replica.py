"""One replica's life, at the moments where it is told to end."""

from __future__ import annotations

import asyncio
from typing import Any

from modelyard.core.engine import CacheInfo, EngineInfo
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.pool import ModelSpec
from modelyard.scheduler.replica import Replica

CACHES = {"main": CacheInfo(100, parallel=2), "fast": CacheInfo(100, parallel=1)}


class Slow:
    """An engine that waits to be let in and to be let go."""

    def __init__(self) -> None:
        self.info = EngineInfo("slow", CACHES)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.opening, self.closing = asyncio.Event(), asyncio.Event()
        self.begun, self.closed = asyncio.Event(), 0

    async def open(self, progress: Any) -> None:
        self.begun.set()
        await self.opening.wait()

    async def close(self) -> None:
        await self.closing.wait()
        self.closed += 1


class Reports:
    """What the replica told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.changed = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        def tell(*_: Any) -> None:
            self.told.append(name)
            self.changed.set()

        return tell

    async def until(self, name: str) -> None:
        async with asyncio.timeout(60):
            while name not in self.told:
                self.changed.clear()
                await self.changed.wait()


def staged(**more: Any) -> tuple[Replica, Slow, Reports]:
    engine: Any = Slow()
    reports: Any = Reports()
    blueprint = ModelSpec(name="m", caches=CACHES, make=lambda: engine, **more)
    return Replica(1, "m", blueprint, reports, load_timeout_s=600.0), engine, reports


async def test_one_that_is_closed_while_it_opens_is_never_ready():
    replica, engine, reports = staged()
    engine.closing.set()
    replica.start()
    await engine.begun.wait()
    replica.close()
    replica.close()
    await replica.wait_closed()
    assert (reports.told, engine.closed) == (["on_closed"], 1)


async def test_one_that_is_closed_while_its_lost_engine_closes_waits_for_that():
    replica, engine, reports = staged()
    engine.opening.set()
    replica.start()
    await reports.until("on_ready")
    engine.lost.set_result(Unavailable("killed"))
    while replica.engine is not None:  # noqa: ASYNC110  nobody tells of it
        await asyncio.sleep(0)
    replica.close()
    await asyncio.sleep(0)
    assert "on_closed" not in reports.told
    engine.closing.set()
    await replica.wait_closed()
    assert (reports.told, engine.closed) == (["on_ready", "on_closed"], 1)


async def test_closing_leaves_the_engines_own_future_alone():
    """Its jobs look at it to know whether their engine died."""
    replica, engine, reports = staged()
    engine.opening.set()
    engine.closing.set()
    replica.start()
    await reports.until("on_ready")
    replica.close()
    await replica.wait_closed()
    assert not engine.lost.done()


async def test_places_of_an_engine_that_is_gone_do_not_come_back_to_the_next():
    replica, engine, reports = staged()
    engine.opening.set()
    engine.closing.set()
    replica.start()
    await reports.until("on_ready")
    replica.acquire("main", 2)
    replica.release("main", 2, Slow(), 1.0)  # type: ignore[arg-type]
    assert (replica.free_slots["main"], replica.running) == (0, 2)
    replica.release("main", 2, engine, 2.0)
    assert (replica.free_slots["main"], replica.running, replica.idle_since) == (2, 0, 2.0)
    replica.close()
    await replica.wait_closed()


async def test_what_opening_took_is_what_grew_in_between():
    readings = iter(({"cpu": 100}, {"cpu": 350, "gpu": 7}))
    replica, engine, reports = staged()
    replica._meter = lambda: next(readings)
    engine.opening.set()
    engine.closing.set()
    replica.start()
    await reports.until("on_ready")
    assert replica.load_growth == {"cpu": 250, "gpu": 7}
    replica.close()
    await replica.wait_closed()


def test_room_is_bounded_by_the_cache_and_by_target_inflight():
    blueprint = ModelSpec(name="m", caches=CACHES, make=lambda: None, target_inflight=1)  # type: ignore[arg-type,return-value]
    replica = Replica(1, "m", blueprint, None, load_timeout_s=1.0)  # type: ignore[arg-type]
    assert not replica.has_room("main", 1)  # no engine
    assert (replica.max_running, replica.free_slots) == (1, {"main": 2, "fast": 1})
