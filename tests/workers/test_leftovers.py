"""What is begun and given up, at whatever moment, leaves no engine, no link and no process behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.errors import Unavailable
from modelyard.engines.fake.engine import FakeTextEngine
from modelyard.workers.messages import open_engine_message
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.transport import DealerSocket, RouterSocket
from modelyard.workers.worker import Worker
from modelyard.workers.worker_pool import WorkerPool
from tests.engines.reading import end, read
from tests.workers.conftest import Closing
from tests.workers.stage import DEADLINE_S, PATIENT, address, prompt, spec, talking, until, working
from tests.workers.test_split import BRISK, Yard, demand, gateway, leased, yard


class Slow:
    """The fake engine opens when it is let; `closed` counts those that were closed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, self.closed = asyncio.Event(), asyncio.Event(), 0
        open_, close = FakeTextEngine.open, FakeTextEngine.close

        async def opening(engine: Any, progress: Any) -> None:
            self.begun.set()
            await self.go.wait()
            await open_(engine, progress)

        async def closing(engine: Any) -> None:
            self.closed += 1
            await close(engine)

        patch.setattr(FakeTextEngine, "open", opening)
        patch.setattr(FakeTextEngine, "close", closing)


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


async def test_a_load_that_is_given_up_leaves_no_engine_in_a_worker_of_others(slow: Slow, tmp_path: Path) -> None:
    async with working(heartbeat=BRISK) as worker:
        there = Yard(tmp_path, [worker])
        await there.start()
        try:
            loading = there.scheduler.load("demo")
            await asyncio.wait_for(slow.begun.wait(), DEADLINE_S)
            await asyncio.wait_for(there.scheduler.unload("demo", True), DEADLINE_S)
            await asyncio.gather(loading, return_exceptions=True)
            await until(lambda: slow.closed > 0)
            assert worker._engines == {}
        finally:
            await there.close()


async def test_a_worker_that_ends_while_an_engine_opens_closes_it_and_opens_no_other(
    slow: Slow, closing: Closing
) -> None:
    worker = closing(Worker(address(), heartbeat=PATIENT))
    try:
        async with talking(worker) as session:
            first = asyncio.create_task(session.open(open_engine_message("a", "fake", spec()), lambda *_: None))
            await asyncio.wait_for(slow.begun.wait(), DEADLINE_S)
            closing = asyncio.create_task(worker.close())
            second = asyncio.create_task(session.open(open_engine_message("b", "fake", spec()), lambda *_: None))
            await asyncio.wait_for(closing, DEADLINE_S)
            session.end(Unavailable("it has gone"))
            for opening in (first, second):
                with pytest.raises(Unavailable):
                    await opening
        assert slow.closed == 1
        assert worker._engines == {}
        assert worker._tasks == set()
    finally:
        await worker.close()


async def test_who_asks_a_pool_to_end_twice_waits_for_the_same_end(tmp_path: Path, closing: Closing) -> None:
    async with yard(tmp_path) as there:
        pool = closing(RemotePool(there.endpoint, "g", heartbeat=BRISK))
        await until(lambda: pool.engine("demo") is not None)
        hasty = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        hasty.cancel()
        await asyncio.gather(hasty, return_exceptions=True)
        await asyncio.wait_for(pool.close(), DEADLINE_S)
        assert all(session.is_lost for session in pool._sessions.values())
        assert all(session._socket._socket.closed for session in pool._sessions.values())


async def test_a_desk_that_ends_is_deaf_before_it_is_done(tmp_path: Path) -> None:
    async with yard(tmp_path) as there, gateway(there) as pool:
        held = [await leased(pool) for _ in range(2)]
        waiting = [pool.request(demand()) for _ in range(3)]
        await until(lambda: there.scheduler.status()["demo"].waiting == 3)
        closing = asyncio.create_task(there.desk.close())
        waiting += [pool.request(demand()) for _ in range(3)]  # on their way while it ends
        await asyncio.wait_for(closing, DEADLINE_S)
        assert there.desk._tasks == set()
        for place in (*held, *waiting):
            place.cancel()


async def test_a_worker_that_was_too_busy_to_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: Closing
) -> None:
    monkeypatch.setattr("modelyard.workers.worker_pool._CONNECT_S", 0.05)
    monkeypatch.setattr("modelyard.workers.worker_pool._RETRY_S", 0.05)
    crew, endpoint, tries = WorkerPool(tmp_path, heartbeat=PATIENT, launch=False), address(), []
    deaf = closing(RouterSocket(endpoint, lambda peer, _: tries.append(peer)))
    crew.register("w", endpoint, [])
    hiring = asyncio.create_task(crew.acquire("x"))
    try:
        await until(lambda: len(tries) > 1)
    finally:
        await deaf.close()
    async with working(endpoint):
        hire = await asyncio.wait_for(hiring, DEADLINE_S)
        assert hire.session.welcome is not None
        await hire.close()


async def test_an_address_that_cannot_be_dialled_is_told_of_and_nothing_stays_open() -> None:
    with pytest.raises(Unavailable, match="cannot connect to tcp://127"):
        DealerSocket("tcp://127.0.0.1:*", lambda _: None, lambda _: None)


async def test_a_link_that_broke_alone_is_made_anew_with_the_next_place(tmp_path: Path) -> None:
    """The worker is well, and so says the scheduler: it was only our link to it."""
    async with yard(tmp_path) as there, gateway(there) as pool:
        (await leased(pool)).release()
        (session,) = pool._sessions.values()
        session.end(Unavailable("the link broke"))
        lease = await leased(pool, is_retry=True)
        assert end(await asyncio.wait_for(read(lease.engine.generate(prompt("Hello."))), DEADLINE_S)).reason == "stop"
        lease.release()
