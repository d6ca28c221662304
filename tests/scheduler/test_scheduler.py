"""The scheduler with engines that do nothing but open, die and close when told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineInfo
from modelyard.core.errors import Cancelled, Conflict, InvalidRequest, ModelyardError, NotFound, Overloaded, Unavailable
from modelyard.core.lease import Demand
from modelyard.scheduler.scheduler import Bounds, Scheduler

CACHES = {"main": CacheInfo(window=100, parallel=1), "fast": CacheInfo(window=100, parallel=2)}


class Puppet:
    """An engine whose opening waits for `gate` and whose death is ours to call."""

    def __init__(self, gate: asyncio.Event, fault: ModelyardError | None = None) -> None:
        self.info = EngineInfo("puppet", CACHES)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._gate, self._fault = gate, fault
        self.closed = 0
        self.stuck = False

    async def open(self, progress: Any) -> None:
        progress(0.5, "half way")
        await self._gate.wait()
        if self._fault is not None:
            raise self._fault

    async def close(self) -> None:
        self.closed += 1
        if self.stuck:
            raise RuntimeError("the device is gone")


class Stage:
    """A scheduler with one model `m`; every engine it ever made is in `engines`."""

    def __init__(self, *, fault: ModelyardError | None = None, bounds: Bounds = Bounds()) -> None:
        self.gate, self.fault = asyncio.Event(), fault
        self.engines: list[Puppet] = []
        self.scheduler = Scheduler(bounds)
        self.scheduler.add("m", CACHES, self._make)

    def _make(self) -> Any:
        self.engines.append(Puppet(self.gate, self.fault))
        return self.engines[-1]

    async def up(self) -> Stage:
        self.gate.set()
        self.scheduler.load("m")
        await until(lambda: self.state != "loading")
        return self

    @property
    def state(self) -> str:
        return self.scheduler.status()["m"].state

    def ask(self, cache: str = "main", **more: Any) -> Any:
        return self.scheduler.request(Demand(model="m", cache=cache, **more))


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110  the scheduler tells nobody of its changes
            await asyncio.sleep(0)


async def test_a_free_place_is_granted_without_waiting():
    stage = await Stage().up()
    ticket = stage.ask()
    assert ticket.granted
    lease = await ticket.lease()
    assert lease.engine is stage.engines[0]
    assert lease.cache == "main"
    assert stage.scheduler.status()["m"].running == 1
    lease.release()
    lease.release()
    assert stage.scheduler.status()["m"].running == 0
    await stage.scheduler.close()


async def test_caches_have_queues_of_their_own():
    stage = await Stage().up()
    stage.ask("main")
    assert not stage.ask("main").granted
    assert stage.ask("fast").granted
    assert repr(stage.scheduler) == "<Scheduler [m: ready, 2 running, 1 waiting]>"
    await stage.scheduler.close()


async def test_a_released_place_goes_to_the_first_who_waits():
    stage = await Stage().up()
    first = await stage.ask().lease()
    second, third = stage.ask(), stage.ask()
    assert (second.position, third.position) == (1, 2)
    first.release()
    assert (await second.lease()).waited >= 0
    assert not third.granted
    await stage.scheduler.close()


async def test_a_cancelled_waiter_leaves_the_queue_and_hears_of_it():
    stage = await Stage().up()
    stage.ask()
    waiting = stage.ask()
    waiting.cancel()
    waiting.cancel()
    with pytest.raises(Cancelled):
        await waiting.lease()
    assert stage.scheduler.status()["m"].waiting == 0
    await stage.scheduler.close()


async def test_a_granted_ticket_that_is_cancelled_gives_its_place_back():
    stage = await Stage().up()
    stage.ask().cancel()
    assert stage.ask().granted
    await stage.scheduler.close()


async def test_a_task_cancelled_while_it_waits_does_not_break_the_queue():
    stage = await Stage().up()
    lease = await stage.ask().lease()
    ticket = stage.ask()
    task = asyncio.create_task(ticket.lease())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    lease.release()
    assert ticket.granted
    ticket.cancel()
    assert stage.ask().granted
    await stage.scheduler.close()


async def test_requests_wait_for_a_model_that_is_loading():
    stage = Stage()
    stage.scheduler.load("m")
    await until(lambda: stage.scheduler.status()["m"].progress == 0.5)
    ticket = stage.ask()
    assert not ticket.granted
    stage.gate.set()
    assert (await ticket.lease()).engine is stage.engines[0]
    assert len(stage.engines) == 1
    await stage.scheduler.close()


async def test_a_stopped_model_is_refused_and_the_answer_says_how_to_load_it():
    stage = Stage()
    with pytest.raises(Conflict, match="POST /v1/admin/models/m/load"):
        stage.ask()


async def test_an_unknown_model_is_not_found():
    with pytest.raises(NotFound):
        Stage().scheduler.request(Demand(model="x", cache="x"))


async def test_a_failed_load_keeps_its_reason_and_refuses_those_who_waited():
    stage = Stage(fault=InvalidRequest("truncated file"))
    stage.scheduler.load("m")
    ticket = stage.ask()
    stage.gate.set()
    with pytest.raises(Unavailable, match="truncated file"):
        await ticket.lease()
    assert stage.scheduler.status()["m"].reason == "truncated file"
    with pytest.raises(Unavailable, match="truncated file"):
        stage.ask()
    assert stage.engines[0].closed == 1
    await stage.scheduler.close()


async def test_a_lost_engine_is_reopened_and_those_who_waited_get_the_new_one():
    stage = await Stage().up()
    held = await stage.ask().lease()
    waiting = stage.ask()
    stage.engines[0].lost.set_result(Unavailable("killed"))
    await until(lambda: len(stage.engines) == 2 and stage.state == "ready")
    held.release()
    assert (await waiting.lease()).engine is stage.engines[1]
    assert stage.engines[0].closed == 1
    await stage.scheduler.close()


async def test_a_lost_engine_is_granted_to_nobody_even_before_its_replica_has_noticed():
    """Its jobs hear of the death first and ask for another place at once."""
    stage = await Stage().up()
    stage.engines[0].lost.set_result(Unavailable("killed"))
    ticket = stage.ask()
    assert not ticket.granted
    assert stage.scheduler.engine("m") is None
    assert (await ticket.lease()).engine is stage.engines[1]
    await stage.scheduler.close()


async def test_a_lost_engine_that_does_not_come_back_in_time_is_unavailable():
    stage = await Stage(bounds=Bounds(timeout=0.0)).up()
    stage.gate.clear()
    await stage.ask().lease()
    waiting = stage.ask()
    stage.engines[0].lost.set_result(Unavailable("killed"))
    with pytest.raises(Unavailable, match="killed"):
        await waiting.lease()
    with pytest.raises(Unavailable, match="killed"):
        stage.ask()
    await stage.scheduler.close()


async def test_closing_refuses_those_who_wait_and_closes_every_engine():
    stage = await Stage().up()
    await stage.ask().lease()
    waiting = stage.ask()
    await stage.scheduler.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting.lease()
    assert stage.engines[0].closed == 1


async def test_a_closed_scheduler_takes_nobody_and_may_be_closed_again():
    stage = await Stage().up()
    await stage.scheduler.close()
    with pytest.raises(Unavailable, match="shutting down"):
        stage.ask()
    await stage.scheduler.close()
    assert stage.engines[0].closed == 1


async def test_a_full_queue_is_overloaded():
    stage = await Stage(bounds=Bounds(max_waiting=1)).up()
    stage.ask()
    stage.ask()
    with pytest.raises(Overloaded):
        stage.ask()
    await stage.scheduler.close()


async def test_more_choices_than_places_get_a_narrower_lease():
    stage = await Stage().up()
    lease = await stage.ask("fast", weight=5).lease()
    assert lease.weight == 2
    await stage.scheduler.close()


async def test_an_engine_that_cannot_be_closed_is_replaced_all_the_same():
    stage = await Stage().up()
    stage.engines[0].stuck = True
    stage.engines[0].lost.set_result(Unavailable("killed"))
    await until(lambda: len(stage.engines) == 2 and stage.state == "ready")
    assert (await stage.ask().lease()).engine is stage.engines[1]
    await stage.scheduler.close()
