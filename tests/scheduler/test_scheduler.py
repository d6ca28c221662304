"""The scheduler with engines that do nothing but open, die and close when told."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineInfo
from modelyard.core.errors import (
    Cancelled,
    Conflict,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Overloaded,
    RateLimited,
    Timeout,
    Unavailable,
)
from modelyard.core.lease import LeaseRequest
from modelyard.scheduler.rate_limit import KeyLimits
from modelyard.scheduler.scheduler import Scheduler
from modelyard.scheduler.settings import SchedulerOptions
from tests.scheduler.stage import EPOCH
from tests.scheduler.stage import Stage as Play

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

    def __init__(self, *, fault: ModelyardError | None = None, bounds: SchedulerOptions = SchedulerOptions()) -> None:
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
        return self.scheduler.request(LeaseRequest(model="m", cache=cache, **more))


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
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
        Stage().scheduler.request(LeaseRequest(model="x", cache="x"))


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
    stage = await Stage(bounds=SchedulerOptions(timeout_s=0.0)).up()
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
    stage = await Stage(bounds=SchedulerOptions(max_waiting=1)).up()
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


# --- who is next ---


async def served_in_order(stage: Play, tickets: list[Any]) -> list[str]:
    """Give the one place back again and again: who gets it?"""
    order = []
    while waiting := [ticket for ticket in tickets if not ticket.is_finished]:
        (running,) = [ticket for ticket in waiting if ticket.granted]
        order.append(running.request.trace)
        running.cancel()
    return order


async def test_keys_take_turns():
    async with Play() as stage:
        stage.model("a")
        await stage.up("a")
        tickets = [stage.ask("a", key=trace[0], trace=trace) for trace in ("a1", "a2", "a3", "b1", "b2", "c1")]
        assert await served_in_order(stage, tickets) == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_background_waits_for_main():
    async with Play() as stage:
        stage.model("a")
        await stage.up("a")
        wanted = (("r", "main"), ("x", "background"), ("m1", "main"), ("y", "background"), ("m2", "main"))
        tickets = [stage.ask("a", trace=trace, priority=priority) for trace, priority in wanted]
        assert await served_in_order(stage, tickets) == ["r", "m1", "m2", "x", "y"]


async def test_positions_are_those_of_now():
    async with Play() as stage:
        stage.model("a")
        await stage.up("a")
        first, second, third = (stage.ask("a") for _ in range(3))
        assert (first.position, second.position, third.position) == (0, 1, 2)
        first.cancel()
        assert (second.position, third.position) == (0, 1)


async def test_whoever_stood_behind_a_heavy_one_that_left_is_asked_at_once():
    async with Play() as stage:
        stage.model("a", parallel=2)
        await stage.up("a")
        stage.ask("a")
        heavy, light = stage.ask("a", weight=2), stage.ask("a")
        assert not light.granted
        heavy.cancel()
        assert light.granted


async def test_target_inflight_bounds_all_caches_of_a_replica_together():
    caches = {"main": CacheInfo(100, 4), "fast": CacheInfo(100, 4)}
    async with Play() as stage:
        stage.model("a", caches=caches, target_inflight=2)
        await stage.up("a")
        first, second = stage.ask("a", "main"), stage.ask("a", "fast")
        third = stage.ask("a", "fast")
        await stage.clock.pass_(1)
        fourth = stage.ask("a", "main")
        assert [t.granted for t in (first, second, third, fourth)] == [True, True, False, False]
        first.cancel()  # a place of main: it goes to whoever has waited longest, in any cache
        assert [t.granted for t in (third, fourth)] == [True, False]
        assert stage.ask("a", "main", weight=9).weight == 2


# --- replicas ---


async def scaled(stage: Play, number: int, **more: Any) -> None:
    stage.model("a", replica_max=number, **more)
    await stage.scheduler.scale("a", number)


async def test_requests_are_spread_over_replicas():
    async with Play() as stage:
        await scaled(stage, 3, parallel=2)
        engines = [stage.ask("a").engine for _ in range(6)]
        assert {engines.count(engine) for engine in engines} == {2}
        assert not stage.ask("a").granted


async def test_a_session_stays_with_its_replica():
    async with Play() as stage:
        await scaled(stage, 2, parallel=4)
        first = stage.ask("a", session="s")
        stage.ask("a", session="other")
        assert {stage.ask("a", session="s").engine for _ in range(3)} == {first.engine}


async def test_a_prompt_goes_where_its_beginning_is_known():
    async with Play() as stage:
        await scaled(stage, 2, parallel=8)
        prompt = list(range(600))
        known = stage.ask("a", prompt=prompt)
        assert stage.ask("a").engine is not known.engine
        assert stage.ask("a", prompt=[*prompt, 1]).engine is known.engine


async def test_a_replica_that_is_lost_gets_nothing_more_and_the_other_takes_over():
    async with Play() as stage:
        await scaled(stage, 2)
        first = stage.ask("a", session="s")
        first.engine.lost.set_result(Unavailable("killed"))
        again = stage.ask("a", session="s")
        assert again.granted
        assert again.engine is not first.engine


# --- time ---


async def test_a_waiter_past_its_deadline_is_refused():
    async with Play() as stage:
        stage.model("a")
        await stage.up("a")
        stage.ask("a")
        hasty, patient = stage.ask("a", deadline=EPOCH + 5), stage.ask("a")
        await stage.clock.pass_(4)
        assert hasty.position == 1
        await stage.clock.pass_(1)
        with pytest.raises(Timeout, match="waited 5 s"):
            await hasty.lease()
        assert patient.position == 1


async def test_nobody_waits_longer_than_the_limit():
    async with Play(max_wait_s=60.0) as stage:
        stage.model("a", autoload=True).gate.clear()
        ticket = stage.ask("a")
        await stage.clock.pass_(60)
        with pytest.raises(Timeout, match="waited 60 s"):
            await ticket.lease()
        assert stage.scheduler.requests() == ()


async def test_a_granted_request_leaves_no_timer_behind():
    async with Play(max_wait_s=60.0) as stage:
        stage.model("a")
        await stage.up("a")
        first, second = stage.ask("a"), stage.ask("a")
        first.cancel()
        assert second.granted
        assert stage.clock.pending == 0


async def test_a_full_queue_says_when_to_come_back_by_how_long_answers_took():
    async with Play(max_waiting=4) as stage:
        stage.model("a", parallel=2)
        await stage.up("a")
        held = await stage.ask("a").lease()
        await stage.clock.pass_(30)
        held.release()
        for _ in range(6):
            stage.ask("a")
        with pytest.raises(Overloaded) as refused:
            stage.ask("a")
        assert (refused.value.retry_after, refused.value.position) == (60.0, 5)


# --- limits a key ---


async def test_a_key_over_its_limit_is_told_when_to_come_back_and_others_are_not():
    async with Play(keys={"ann": KeyLimits(requests_per_minute=2)}) as stage:
        stage.model("a", parallel=9)
        await stage.up("a")
        stage.ask("a", key="ann")
        stage.ask("a", key="ann")
        with pytest.raises(RateLimited, match="2 requests a minute") as refused:
            stage.ask("a", key="ann")
        assert refused.value.retry_after == pytest.approx(30)
        assert stage.ask("a", key="bob").granted
        await stage.clock.pass_(30)
        assert stage.ask("a", key="ann").granted


async def test_those_who_wait_count_as_at_work_and_those_who_left_do_not():
    async with Play(keys={"ann": KeyLimits(max_concurrent=2)}) as stage:
        stage.model("a")
        await stage.up("a")
        running, waiting = stage.ask("a", key="ann"), stage.ask("a", key="ann")
        with pytest.raises(RateLimited, match="2 requests at a time"):
            stage.ask("a", key="ann")
        waiting.cancel()
        running.cancel()
        assert [stage.ask("a", key="ann").granted for _ in range(2)] == [True, False]


async def test_refusing_everybody_frees_their_keys():
    async with Play(keys={"ann": KeyLimits(max_concurrent=1)}) as stage:
        act = stage.model("a", autoload=True)
        act.fault = InvalidRequest("truncated file")
        with pytest.raises(Unavailable):
            await stage.ask("a", key="ann").lease()
        act.fault = None
        await stage.clock.pass_(61)
        assert await stage.ask("a", key="ann").lease()


async def test_output_tokens_count_and_a_second_try_does_not():
    async with Play(keys={"ann": KeyLimits(tokens_per_minute=600, requests_per_minute=2)}) as stage:
        stage.model("a", parallel=9)
        await stage.up("a")
        stage.ask("a", key="ann", tokens=100).spend(800)
        stage.ask("a", key="ann", tokens=100, is_retry=True)
        with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
            stage.ask("a", key="ann", tokens=100)
        assert refused.value.retry_after == pytest.approx(40)


async def test_new_limits_hold_at_once_and_unchanged_ones_remember():
    async with Play(keys={"ann": KeyLimits(requests_per_minute=1), "bob": KeyLimits(requests_per_minute=1)}) as stage:
        stage.model("a", parallel=9)
        await stage.up("a")
        stage.ask("a", key="ann")
        stage.ask("a", key="bob")
        stage.scheduler.set_limits({"ann": KeyLimits(requests_per_minute=5), "bob": KeyLimits(requests_per_minute=1)})
        assert stage.ask("a", key="ann").granted
        with pytest.raises(RateLimited):
            stage.ask("a", key="bob")


# --- nothing is left behind ---


async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind():
    dice = Random(5)
    async with Play(limit=10, max_wait_s=600.0, linger_s=0.0, keys={"k1": KeyLimits(max_concurrent=1000)}) as stage:
        for name in "abc":
            stage.model(name, size=4, parallel=2, autoload=True)
        tickets = [
            stage.ask(dice.choice("abc"), key=f"k{dice.randrange(3)}", weight=dice.choice((1, 1, 2)))
            for _ in range(200)
        ]
        while tickets:
            for ticket in dice.sample(tickets, min(7, len(tickets))):
                ticket.cancel()  # a waiter leaves, or one that runs is done
            tickets = [ticket for ticket in tickets if not ticket.is_finished]
            await stage.clock.pass_(0.5)
        await stage.settle()
        snapshot = stage.scheduler.snapshot().models.values()
        assert [(m.running, m.waiting, m.waiting_tokens) for m in snapshot] == [(0, 0, 0)] * 3
        assert [m.places for m in snapshot if m.state == "ready"] == [2] * sum(m.state == "ready" for m in snapshot)
        assert stage.scheduler.requests() == ()
        assert stage.scheduler._rate_limiters["k1"].active == 0
    assert stage.clock.pending == 0
    assert len(asyncio.all_tasks()) == 1
