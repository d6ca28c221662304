"""Which replica takes a request."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Any

from modelyard.core.engine import CacheInfo, EngineInfo, EngineSpec
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.scheduler.pooled_model import Replica, ReplicaAffinity, prefix_hashes


@dataclass
class Candidate:
    id: int
    running: int = 0


LONG = list(range(5000))


def test_an_unknown_request_goes_to_the_least_busy_replica():
    assert ReplicaAffinity().choose(None, (), [Candidate(1, 3), Candidate(2, 1), Candidate(3, 2)]).id == 2


def test_a_session_returns_to_its_replica_even_if_it_is_busier():
    affinity = ReplicaAffinity()
    affinity.record("s", (), 1)
    assert affinity.choose("s", (), [Candidate(1, 30), Candidate(2, 0)]).id == 1


def test_a_session_goes_elsewhere_if_its_replica_has_no_room():
    affinity = ReplicaAffinity()
    affinity.record("s", (), 1)
    assert affinity.choose("s", (), [Candidate(2, 0)]).id == 2


def test_a_session_has_priority_over_a_prefix():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 1)
    affinity.record("s", (), 2)
    assert affinity.choose("s", prefix_hashes(LONG), [Candidate(1), Candidate(2)]).id == 2


def test_a_known_prefix_is_preferred_while_its_replica_is_not_much_busier():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 2)
    assert affinity.choose(None, prefix_hashes(LONG), [Candidate(1, 0), Candidate(2, 2)]).id == 2
    assert affinity.choose(None, prefix_hashes(LONG), [Candidate(1, 0), Candidate(2, 3)]).id == 1


def test_the_longest_known_prefix_wins():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 1)
    affinity.record(None, prefix_hashes(LONG[:100]), 2)  # replaces the replica of the short prefix
    assert affinity.choose(None, prefix_hashes([*LONG[:4096], 7]), [Candidate(1), Candidate(2)]).id == 1
    assert affinity.choose(None, prefix_hashes([*LONG[:80], 7, 7]), [Candidate(1), Candidate(2)]).id == 2


def test_short_prompts_have_no_prefix_hashes():
    assert prefix_hashes(LONG[:63]) == ()
    assert len(prefix_hashes(LONG[:64])) == 1
    assert prefix_hashes(LONG[:512])[-1] == prefix_hashes(LONG[:64])[0]


def test_the_number_of_entries_is_limited():
    affinity = ReplicaAffinity(size=2)
    for session in "abc":
        affinity.record(session, (), 1)
    assert affinity.choose("a", (), [Candidate(1, 5), Candidate(2)]).id == 2
    assert affinity.choose("c", (), [Candidate(1, 5), Candidate(2)]).id == 1


CACHES = {"main": CacheInfo(100, parallel=2), "fast": CacheInfo(100, parallel=1)}


class SlowEngine:
    """An engine whose open and close wait for the test."""

    def __init__(self) -> None:
        self.info = EngineInfo("slow", CACHES)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.opening, self.closing = asyncio.Event(), asyncio.Event()
        self.started, self.closed = asyncio.Event(), 0

    async def open(self, progress: Any) -> None:
        self.started.set()
        await self.opening.wait()

    async def close(self) -> None:
        await self.closing.wait()
        self.closed += 1


class RecordingObserver:
    """Records the names of the callbacks in order."""

    check = None

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        def record(*_: Any) -> None:
            self.events.append(name)
            self.changed.set()

        return record

    async def until(self, name: str) -> None:
        async with asyncio.timeout(60):
            while name not in self.events:
                self.changed.clear()
                await self.changed.wait()


def make_replica(**more: Any) -> tuple[Replica, SlowEngine, RecordingObserver]:
    engine: Any = SlowEngine()
    observer: Any = RecordingObserver()
    observer.create = lambda *_: engine
    return Replica(1, "m", EngineSpec("m", None, CACHES, **more), observer, load_timeout_s=600.0), engine, observer


async def test_a_replica_closed_while_it_opens_is_never_ready():
    replica, engine, observer = make_replica()
    engine.closing.set()
    replica.start()
    await engine.started.wait()
    replica.close()
    replica.close()
    await replica.wait_closed()
    assert (observer.events, engine.closed) == (["on_closed"], 1)


async def test_a_closed_replica_refers_to_nothing_of_its_engine():
    """Its memory is freed at once: the collector of a server runs rarely."""
    observer: Any = RecordingObserver()
    made: list[weakref.ref[SlowEngine]] = []

    def make(*_: object) -> Any:
        engine = SlowEngine()
        engine.opening.set()
        engine.closing.set()
        made.append(weakref.ref(engine))
        return engine

    observer.create = make
    replica = Replica(1, "m", EngineSpec("m", None, CACHES), observer, load_timeout_s=600.0)
    gc.disable()
    try:
        replica.start()
        await observer.until("on_ready")
        replica.close()
        await replica.wait_closed()
        assert made[0]() is None
    finally:
        gc.enable()


async def test_closing_waits_for_the_close_of_a_lost_engine():
    replica, engine, observer = make_replica()
    engine.opening.set()
    replica.start()
    await observer.until("on_ready")
    engine.lost.set_result(Unavailable("killed"))
    while replica.engine is not None:  # noqa: ASYNC110  there is no event to wait for
        await asyncio.sleep(0)
    replica.close()
    await asyncio.sleep(0)
    assert "on_closed" not in observer.events
    engine.closing.set()
    await replica.wait_closed()
    assert (observer.events, engine.closed) == (["on_ready", "on_closed"], 1)


async def test_closing_does_not_resolve_the_engines_lost_future():
    """Its requests check the future to know whether the engine died."""
    replica, engine, observer = make_replica()
    engine.opening.set()
    engine.closing.set()
    replica.start()
    await observer.until("on_ready")
    replica.close()
    await replica.wait_closed()
    assert not engine.lost.done()


async def test_slots_of_an_old_engine_are_not_returned_to_the_new_one():
    replica, engine, observer = make_replica()
    engine.opening.set()
    engine.closing.set()
    replica.start()
    await observer.until("on_ready")
    replica.acquire("main", 2)
    replica.release("main", 2, SlowEngine(), 1.0)  # type: ignore[arg-type]
    assert (replica.free_slots["main"], replica.running) == (0, 2)
    replica.release("main", 2, engine, 2.0)
    assert (replica.free_slots["main"], replica.running, replica.idle_since) == (2, 0, 2.0)
    replica.close()
    await replica.wait_closed()


async def test_load_growth_is_the_difference_of_two_readings():
    readings = iter(({"cpu": 100}, {"cpu": 350, "gpu": 7}))
    replica, engine, observer = make_replica()
    replica._meter = lambda: next(readings)
    engine.opening.set()
    engine.closing.set()
    replica.start()
    await observer.until("on_ready")
    assert replica.load_growth == {"cpu": 250, "gpu": 7}
    replica.close()
    await replica.wait_closed()


def test_room_is_bounded_by_the_cache_and_by_target_inflight():
    spec = EngineSpec("m", None, CACHES, target_inflight=1)
    replica = Replica(1, "m", spec, None, load_timeout_s=1.0)  # type: ignore[arg-type]
    assert not replica.has_room("main", 1)  # no engine
    assert (replica.max_running, replica.free_slots) == (1, {"main": 2, "fast": 1})
