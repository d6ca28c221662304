"""The scheduler with fake engines: leases, queues, limits, replicas and admin operations."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, MemoryEstimate
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
from modelyard.core.pool import KeyLimits, ModelStateChange
from modelyard.scheduler.queue import KEEP_S
from tests.scheduler.harness import EPOCH, Harness, until

CACHES = {"main": CacheInfo(window=100, parallel=1), "fast": CacheInfo(window=100, parallel=2)}

# --- leases ---


async def test_a_free_slot_is_granted_at_once_and_released_once():
    async with Harness() as harness:
        model = await harness.load_model("a")
        ticket = harness.request()
        assert ticket.granted
        lease = await ticket.lease()
        assert (lease.engine, lease.cache) == (model.engines[0], "main")
        assert harness.scheduler.status()["a"].running == 1
        lease.release()
        lease.release()
        assert harness.scheduler.status()["a"].running == 0


async def test_each_cache_has_its_own_queue():
    async with Harness() as harness:
        await harness.load_model("a", caches=CACHES)
        harness.request(cache="main")
        assert not harness.request(cache="main").granted
        assert harness.request(cache="fast").granted
        assert repr(harness.scheduler) == "<Scheduler [a: ready, 2 running, 1 waiting]>"


async def test_a_released_slot_goes_to_the_head_of_the_queue():
    async with Harness() as harness:
        await harness.load_model("a")
        first = await harness.request().lease()
        second, third = harness.request(), harness.request()
        assert (second.position, third.position) == (1, 2)
        first.release()
        assert (await second.lease()).waited >= 0
        assert not third.granted


async def test_a_cancelled_waiter_leaves_the_queue_and_its_lease_raises():
    async with Harness() as harness:
        await harness.load_model("a")
        harness.request()
        waiting = harness.request()
        waiting.cancel()
        waiting.cancel()
        with pytest.raises(Cancelled):
            await waiting.lease()
        assert harness.scheduler.status()["a"].waiting == 0


async def test_cancelling_a_granted_ticket_releases_its_slot():
    async with Harness() as harness:
        await harness.load_model("a")
        harness.request().cancel()
        assert harness.request().granted


async def test_a_task_cancelled_while_it_waits_does_not_break_the_queue():
    async with Harness() as harness:
        await harness.load_model("a")
        lease = await harness.request().lease()
        ticket = harness.request()
        task = asyncio.create_task(ticket.lease())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        lease.release()
        assert ticket.granted
        ticket.cancel()
        assert harness.request().granted


async def test_requests_wait_for_a_model_that_is_loading():
    async with Harness() as harness:
        model = harness.add_model("a")
        model.gate.clear()
        harness.scheduler.load("a")
        await until(lambda: harness.scheduler.status()["a"].progress == 0.5)
        ticket = harness.request()
        assert not ticket.granted
        model.gate.set()
        assert (await ticket.lease()).engine is model.engines[0]
        assert len(model.engines) == 1


async def test_a_request_to_a_stopped_model_is_refused_with_the_way_to_load_it():
    async with Harness() as harness:
        harness.add_model("a")
        with pytest.raises(Conflict, match="POST /v1/admin/models/a/load"):
            harness.request()


async def test_a_request_to_an_unknown_model_is_not_found():
    async with Harness() as harness:
        with pytest.raises(NotFound):
            harness.request("x")


async def test_a_failed_load_refuses_waiting_and_later_requests_with_its_reason():
    async with Harness() as harness:
        model = harness.add_model("a")
        model.fault = InvalidRequest("truncated file")
        harness.scheduler.load("a")
        with pytest.raises(Unavailable, match="truncated file"):
            await harness.request().lease()
        assert harness.scheduler.status()["a"].reason == "truncated file"
        with pytest.raises(Unavailable, match="truncated file"):
            harness.request()
        assert model.engines[0].closed == 1


async def test_a_lost_engine_is_reopened_and_waiting_requests_get_the_new_one():
    async with Harness() as harness:
        model = await harness.load_model("a")
        held = await harness.request().lease()
        waiting = harness.request()
        model.engines[0].lost.set_result(Unavailable("killed"))
        await until(lambda: len(model.engines) == 2 and harness.states() == {"a": "ready"})
        held.release()
        assert (await waiting.lease()).engine is model.engines[1]
        assert model.engines[0].closed == 1


async def test_a_lost_engine_is_not_granted_even_before_its_replica_has_noticed():
    """Requests of a lost engine learn of it first and are retried at once."""
    async with Harness() as harness:
        model = await harness.load_model("a")
        model.engines[0].lost.set_result(Unavailable("killed"))
        ticket = harness.request()
        assert not ticket.granted
        assert harness.scheduler.engine("a") is None
        assert (await ticket.lease()).engine is model.engines[1]


async def test_requests_are_refused_if_a_lost_engine_does_not_come_back_in_time():
    async with Harness(timeout_s=5.0) as harness:
        model = await harness.load_model("a")
        await harness.request().lease()
        waiting = harness.request()
        model.gate.clear()
        model.engines[0].lost.set_result(Unavailable("killed"))
        await harness.clock.advance(5.1)
        with pytest.raises(Unavailable, match="killed"):
            await waiting.lease()
        with pytest.raises(Unavailable, match="killed"):
            harness.request()


async def test_closing_refuses_waiting_and_later_requests_and_closes_every_engine_once():
    harness = Harness()
    model = await harness.load_model("a")
    await harness.request().lease()
    waiting = harness.request()
    await harness.scheduler.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting.lease()
    with pytest.raises(Unavailable, match="shutting down"):
        harness.request()
    await harness.scheduler.close()
    assert model.engines[0].closed == 1


async def test_a_full_queue_is_overloaded():
    async with Harness(max_waiting=1) as harness:
        await harness.load_model("a")
        harness.request()
        harness.request()
        with pytest.raises(Overloaded):
            harness.request()


async def test_a_request_for_more_choices_than_slots_gets_a_narrower_lease():
    async with Harness() as harness:
        await harness.load_model("a", caches=CACHES)
        assert (await harness.request(cache="fast", weight=5).lease()).weight == 2


async def test_an_engine_whose_close_fails_is_replaced_nevertheless():
    async with Harness() as harness:
        model = await harness.load_model("a")
        model.engines[0].close_error = RuntimeError("the device is gone")
        model.engines[0].lost.set_result(Unavailable("killed"))
        await until(lambda: len(model.engines) == 2 and harness.states() == {"a": "ready"})
        assert (await harness.request().lease()).engine is model.engines[1]


# --- the order of the queue ---


def served_in_order(tickets: list[Any]) -> list[str]:
    """Release the only slot again and again: which traces get it?"""
    order = []
    while waiting := [ticket for ticket in tickets if not ticket.is_finished]:
        (running,) = [ticket for ticket in waiting if ticket.granted]
        order.append(running.request.trace)
        running.cancel()
    return order


async def test_keys_take_turns():
    async with Harness() as harness:
        await harness.load_model("a")
        tickets = [harness.request("a", key=trace[0], trace=trace) for trace in ("a1", "a2", "a3", "b1", "b2", "c1")]
        assert served_in_order(tickets) == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_background_requests_wait_for_main_requests():
    async with Harness() as harness:
        await harness.load_model("a")
        wanted = (("r", "main"), ("x", "background"), ("m1", "main"), ("y", "background"), ("m2", "main"))
        tickets = [harness.request("a", trace=trace, priority=priority) for trace, priority in wanted]
        assert served_in_order(tickets) == ["r", "m1", "m2", "x", "y"]


async def test_positions_are_always_current():
    async with Harness() as harness:
        await harness.load_model("a")
        first, second, third = (harness.request("a") for _ in range(3))
        assert (first.position, second.position, third.position) == (0, 1, 2)
        first.cancel()
        assert (second.position, third.position) == (0, 1)


async def test_the_next_waiter_is_admitted_when_a_heavy_request_ahead_is_cancelled():
    async with Harness() as harness:
        await harness.load_model("a", parallel=2)
        harness.request("a")
        heavy, light = harness.request("a", weight=2), harness.request("a")
        assert not light.granted
        heavy.cancel()
        assert light.granted


async def test_target_inflight_bounds_all_caches_of_a_replica_together():
    caches = {"main": CacheInfo(100, 4), "fast": CacheInfo(100, 4)}
    async with Harness() as harness:
        await harness.load_model("a", caches=caches, target_inflight=2)
        first, second = harness.request("a", "main"), harness.request("a", "fast")
        third = harness.request("a", "fast")
        await harness.clock.advance(1)
        fourth = harness.request("a", "main")
        assert [t.granted for t in (first, second, third, fourth)] == [True, True, False, False]
        first.cancel()  # a slot of main goes to the longest waiter of any cache
        assert [t.granted for t in (third, fourth)] == [True, False]
        assert harness.request("a", "main", weight=9).weight == 2


# --- replicas ---


async def scaled(harness: Harness, number: int, **more: Any) -> None:
    harness.add_model("a", replica_max=number, **more)
    await harness.scheduler.scale("a", number)


async def test_requests_are_spread_over_replicas():
    async with Harness() as harness:
        await scaled(harness, 3, parallel=2)
        engines = [harness.request("a").engine for _ in range(6)]
        assert {engines.count(engine) for engine in engines} == {2}
        assert not harness.request("a").granted


async def test_a_session_stays_on_its_replica():
    async with Harness() as harness:
        await scaled(harness, 2, parallel=4)
        first = harness.request("a", session="s")
        harness.request("a", session="other")
        assert {harness.request("a", session="s").engine for _ in range(3)} == {first.engine}


async def test_a_prompt_goes_to_the_replica_that_served_its_prefix():
    async with Harness() as harness:
        await scaled(harness, 2, parallel=8)
        prompt = list(range(600))
        known = harness.request("a", prompt=prompt)
        assert harness.request("a").engine is not known.engine
        assert harness.request("a", prompt=[*prompt, 1]).engine is known.engine


async def test_a_lost_replica_gets_no_more_requests_and_the_other_takes_over():
    async with Harness() as harness:
        await scaled(harness, 2)
        first = harness.request("a", session="s")
        first.engine.lost.set_result(Unavailable("killed"))
        again = harness.request("a", session="s")
        assert again.granted
        assert again.engine is not first.engine


# --- timeouts ---


async def test_a_waiter_past_its_deadline_is_refused():
    async with Harness() as harness:
        await harness.load_model("a")
        harness.request("a")
        hasty, patient = harness.request("a", deadline=harness.clock.now() + 5), harness.request("a")
        await harness.clock.advance(4)
        assert hasty.position == 1
        await harness.clock.advance(1)
        with pytest.raises(Timeout, match="waited 5 s"):
            await hasty.lease()
        assert patient.position == 1


async def test_no_request_waits_longer_than_max_wait_s():
    async with Harness(max_wait_s=60.0) as harness:
        harness.add_model("a", autoload=True).gate.clear()
        ticket = harness.request("a")
        await harness.clock.advance(60)
        with pytest.raises(Timeout, match="waited 60 s"):
            await ticket.lease()
        assert harness.scheduler.requests() == ()


async def test_a_granted_request_leaves_no_timer_behind():
    async with Harness(max_wait_s=60.0) as harness:
        await harness.load_model("a")
        first, second = harness.request("a"), harness.request("a")
        first.cancel()
        assert second.granted
        assert harness.clock.pending == 0


async def test_the_retry_hint_of_a_full_queue_follows_from_the_service_time():
    async with Harness(max_waiting=4) as harness:
        await harness.load_model("a", parallel=2)
        held = await harness.request("a").lease()
        await harness.clock.advance(30)
        held.release()
        for _ in range(6):
            harness.request("a")
        with pytest.raises(Overloaded) as refused:
            harness.request("a")
        assert (refused.value.retry_after, refused.value.position) == (60.0, 5)


# --- slots of several keys ---


async def test_a_slot_is_kept_for_a_key_that_has_asked_lately():
    async with Harness() as harness:
        await harness.load_model(parallel=4)
        harness.request(key="ann").release()
        flood = [harness.request(key="eve") for _ in range(20)]
        assert sum(each.granted for each in flood) == 3
        ann = harness.request(key="ann")
        assert ann.granted
        ann.release()
        assert sum(each.granted for each in flood) == 3
        await harness.clock.advance(KEEP_S)
        assert sum(each.granted for each in flood) == 4
        waiting = harness.request(key="ann")
        flood[0].release()
        assert waiting.granted


async def test_a_key_that_runs_something_leaves_a_slot_for_each_key_that_has_asked_lately():
    async with Harness() as harness:
        await harness.load_model(parallel=4)
        for key in ("ann", "bob", "cyd"):
            harness.request(key=key).release()
        flood = [harness.request(key="eve") for _ in range(3)]
        assert [each.granted for each in flood] == [True, False, False]
        assert all(harness.request(key=key).granted for key in ("ann", "bob", "cyd"))


async def test_keys_with_a_backlog_take_turns_beside_keys_that_ask_one_thing_at_a_time():
    async with Harness() as harness:
        await harness.load_model(parallel=4)
        running = {key: harness.request(key=key) for key in ("ann", "bob", "cyd")}
        floods = {key: [harness.request(key=key) for _ in range(20)] for key in ("eve", "mal")}
        granted = lambda: [sum(each.granted for each in flood) for flood in floods.values()]  # noqa: E731
        assert granted() == [1, 0]
        for key in [*running] * 3:  # none of them waits, though each leaves its slot for a moment
            running[key].release()
            running[key] = harness.request(key=key)
            assert running[key].granted
        assert granted() == [1, 0]
        floods["eve"][0].release()
        assert granted() == [2, 0]  # the first did not wait
        floods["eve"][1].release()
        assert granted() == [2, 1]
        floods["mal"][0].release()
        assert granted() == [3, 1]
        running["ann"].release()
        await harness.clock.advance(KEEP_S)  # she does not come back
        assert granted() == [3, 2]


async def test_the_last_of_a_backlog_takes_no_slot_from_keys_that_ask_one_thing_at_a_time():
    async with Harness() as harness:
        await harness.load_model(parallel=4)
        modest = {key: harness.request(key=key) for key in ("ann", "bob", "cyd")}
        floods = [harness.request(key=key) for key in ("eve", "mal") for _ in range(5)]
        for _ in range(len(floods)):
            for key in modest:
                assert modest[key].granted
                modest[key].release()
                modest[key] = harness.request(key=key)
            (running,) = (each for each in floods if each.granted and not each.is_finished)
            running.release()


async def test_keys_that_ask_one_thing_at_a_time_do_not_starve_a_backlog():
    async with Harness() as harness:
        await harness.load_model(parallel=2)
        flood = [harness.request(key="eve") for _ in range(20)]
        modest = [harness.request(key=str(n)) for n in range(6)]
        flood[0].release()
        flood[1].release()
        for _ in range(12):
            for n, lease in enumerate(modest):
                if lease.granted:
                    lease.release()
                    modest[n] = harness.request(key=str(n))
        assert sum(each.granted for each in flood) > 2


async def test_a_key_that_is_alone_has_all_slots():
    async with Harness() as harness:
        await harness.load_model(parallel=4)
        for _ in range(2):
            leases = [harness.request(key="ann") for _ in range(5)]
            assert [each.granted for each in leases] == [True] * 4 + [False]
            for each in leases:
                each.cancel()


async def test_a_full_queue_drops_the_newest_of_the_key_that_fills_it():
    async with Harness(max_waiting=3) as harness:
        await harness.load_model()
        flood = [harness.request(key="eve") for _ in range(4)]
        ann = harness.request(key="ann")
        with pytest.raises(Overloaded):
            await flood[3].lease()
        flood[0].release()
        flood[1].release()
        assert ann.granted


# --- limits of a key ---


async def test_a_key_over_its_limit_gets_a_retry_hint_and_other_keys_are_not_affected():
    async with Harness(keys={"ann": KeyLimits(requests_per_minute=2)}) as harness:
        await harness.load_model("a", parallel=9)
        harness.request("a", key="ann")
        harness.request("a", key="ann")
        with pytest.raises(RateLimited, match="2 requests a minute") as refused:
            harness.request("a", key="ann")
        assert refused.value.retry_after == pytest.approx(30)
        assert harness.request("a", key="bob").granted
        await harness.clock.advance(30)
        assert harness.request("a", key="ann").granted


async def test_waiting_requests_count_as_concurrent_and_ended_ones_do_not():
    async with Harness(keys={"ann": KeyLimits(max_concurrent=2)}) as harness:
        await harness.load_model("a")
        running, waiting = harness.request("a", key="ann"), harness.request("a", key="ann")
        with pytest.raises(RateLimited, match="2 requests at a time"):
            harness.request("a", key="ann")
        waiting.cancel()
        running.cancel()
        assert [harness.request("a", key="ann").granted for _ in range(2)] == [True, False]


async def test_refused_requests_no_longer_count_against_their_key():
    async with Harness(keys={"ann": KeyLimits(max_concurrent=1)}) as harness:
        model = harness.add_model("a", autoload=True)
        model.fault = InvalidRequest("truncated file")
        with pytest.raises(Unavailable):
            await harness.request("a", key="ann").lease()
        model.fault = None
        await harness.clock.advance(61)
        assert await harness.request("a", key="ann").lease()


async def test_output_tokens_count_against_the_limit_and_retries_do_not():
    async with Harness(keys={"ann": KeyLimits(tokens_per_minute=600, requests_per_minute=2)}) as harness:
        await harness.load_model("a", parallel=9)
        harness.request("a", key="ann", tokens=100).spend(800)
        harness.request("a", key="ann", tokens=100, is_retry=True)
        with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
            harness.request("a", key="ann", tokens=100)
        assert refused.value.retry_after == pytest.approx(40)


async def test_new_limits_apply_at_once_and_unchanged_ones_keep_their_usage():
    async with Harness(
        keys={"ann": KeyLimits(requests_per_minute=1), "bob": KeyLimits(requests_per_minute=1)}
    ) as harness:
        await harness.load_model("a", parallel=9)
        harness.request("a", key="ann")
        harness.request("a", key="bob")
        harness.scheduler.set_limits({"ann": KeyLimits(requests_per_minute=5), "bob": KeyLimits(requests_per_minute=1)})
        assert harness.request("a", key="ann").granted
        with pytest.raises(RateLimited):
            harness.request("a", key="bob")


# --- no leaks ---


async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind():
    random = Random(5)
    async with Harness(
        limit=10, max_wait_s=600.0, linger_s=0.0, keys={"k1": KeyLimits(max_concurrent=1000)}
    ) as harness:
        for name in "abc":
            harness.add_model(name, size=4, parallel=2, autoload=True)
        tickets = [
            harness.request(random.choice("abc"), key=f"k{random.randrange(3)}", weight=random.choice((1, 1, 2)))
            for _ in range(200)
        ]
        while tickets:
            for ticket in random.sample(tickets, min(7, len(tickets))):
                ticket.cancel()  # a waiter leaves, or a running request ends
            tickets = [ticket for ticket in tickets if not ticket.is_finished]
            await harness.clock.advance(0.5)
        await harness.settle()
        snapshot = harness.scheduler.snapshot().models.values()
        assert [(m.running, m.waiting, m.waiting_tokens) for m in snapshot] == [(0, 0, 0)] * 3
        assert [m.slots for m in snapshot if m.state == "ready"] == [2] * sum(m.state == "ready" for m in snapshot)
        assert harness.scheduler.requests() == ()
        assert harness.scheduler._rate_limiters["k1"].active == 0
    assert harness.clock.pending == 0
    assert len(asyncio.all_tasks()) == 1


# --- load and unload ---


async def test_a_load_is_done_when_the_model_is_ready():
    async with Harness() as harness:
        model = harness.add_model("a")
        model.gate.clear()
        first, second = harness.scheduler.load("a"), harness.scheduler.load("a")
        await harness.settle()
        assert not first.done()
        assert (harness.snapshot("a").state, harness.snapshot("a").progress, harness.snapshot("a").phase) == (
            "loading",
            0.5,
            "half way",
        )
        model.gate.set()
        await asyncio.gather(first, second)
        assert len(model.engines) == 1
        await harness.scheduler.load("a")


async def test_a_failing_load_raises_its_reason_and_can_be_repeated():
    async with Harness() as harness:
        harness.add_model("a").fault = InvalidRequest("truncated file")
        with pytest.raises(InvalidRequest, match="truncated file"):
            await harness.scheduler.load("a")
        harness.models["a"].fault = None
        await harness.scheduler.load("a")
        assert harness.snapshot("a").reason == ""


async def test_admin_operations_on_an_unknown_model_are_not_found():
    async with Harness() as harness:
        for operation in (
            harness.scheduler.load,
            harness.scheduler.unload,
            harness.scheduler.drain,
            harness.scheduler.engines,
        ):
            with pytest.raises(NotFound):
                operation("unknown")


async def test_a_load_evicts_an_idle_model():
    async with Harness(limit=10) as harness:
        harness.add_model("a", size=6)
        harness.add_model("b", size=6)
        await harness.scheduler.load("a")
        await harness.clock.advance(5)
        await harness.scheduler.load("b")
        assert harness.states() == {"a": "stopped", "b": "ready"}


async def test_unload_lets_running_requests_finish_and_refuses_waiting_ones():
    async with Harness() as harness:
        model = await harness.load_model("a")
        held, waiting = await harness.request("a").lease(), harness.request("a")
        gone = harness.scheduler.unload("a")
        with pytest.raises(Unavailable, match="was unloaded"):
            await waiting.lease()
        with pytest.raises(Conflict, match="not loaded"):
            harness.request("a")
        await harness.settle()
        assert (harness.snapshot("a").state, model.open, gone.done()) == ("draining", 1, False)
        held.release()
        await gone
        assert (harness.snapshot("a").state, model.open) == ("stopped", 0)


async def test_forced_unload_revokes_running_requests():
    async with Harness() as harness:
        model = await harness.load_model("a", parallel=2)
        errors: list[ModelyardError] = []
        held, other = await harness.request("a").lease(), await harness.request("a").lease()
        held.on_revoke(errors.append)
        await harness.scheduler.unload("a", force=True)
        other.on_revoke(errors.append)  # a callback registered after the revocation runs at once
        assert [error.code for error in errors] == ["model_unloaded"] * 2
        assert model.open == 0
        held.release()
        other.release()
        assert harness.snapshot("a").running == 0


async def test_unload_aborts_a_load_in_progress():
    async with Harness() as harness:
        model = harness.add_model("a")
        model.gate.clear()
        loading = harness.scheduler.load("a")
        await harness.settle()
        await harness.scheduler.unload("a")
        with pytest.raises(Conflict, match="before it was ready"):
            await loading
        assert (harness.snapshot("a").state, model.open) == ("stopped", 0)


async def test_unloading_a_stopped_model_is_done_at_once():
    async with Harness() as harness:
        harness.add_model("a")
        await harness.scheduler.unload("a")
        assert harness.states() == {"a": "stopped"}


async def test_an_autoload_model_loads_again_while_its_old_engine_drains():
    async with Harness() as harness:
        model = harness.add_model("a", autoload=True)
        held = await harness.request("a").lease()
        harness.scheduler.unload("a")
        assert (await harness.request("a").lease()).engine is model.engines[1]
        held.release()
        await until(lambda: model.engines[0].closed)


async def test_a_command_need_not_be_awaited():
    async with Harness() as harness:
        harness.add_model("a").fault = InvalidRequest("truncated file")
        harness.scheduler.load("a")
        await harness.wait_for_state("a", "failed")


async def test_commands_to_a_closed_scheduler_are_refused_and_pending_ones_fail():
    harness = Harness()
    harness.add_model("a").gate.clear()
    pending = harness.scheduler.load("a")
    await harness.scheduler.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await pending
    with pytest.raises(Unavailable, match="shutting down"):
        harness.scheduler.load("a")


# --- overrides ---


def overridable(harness: Harness) -> None:
    spec = harness.spec("a")

    def override(_: str, overrides: Any) -> Any:
        if "n_ctx" not in overrides:
            raise InvalidRequest("unknown")
        return replace(spec, caches={"main": CacheInfo(overrides["n_ctx"])})

    harness.scheduler.reconfigure({"a": spec}, override)


async def test_overrides_apply_until_the_next_unload():
    async with Harness() as harness:
        overridable(harness)
        await harness.scheduler.load("a", {"n_ctx": 64})
        assert harness.snapshot("a").caches["main"].window == 64
        assert harness.snapshot("a").overrides == {"n_ctx": 64}
        await harness.scheduler.load("a", {"n_ctx": 64})
        with pytest.raises(Conflict, match="unload it first"):
            harness.scheduler.load("a", {"n_ctx": 65})
        with pytest.raises(InvalidRequest, match="unknown"):  # as in every other state
            harness.scheduler.load("a", {"colour": "red"})
        await harness.scheduler.unload("a")
        await harness.scheduler.load("a")
        assert harness.snapshot("a").caches["main"].window == 100
        assert harness.snapshot("a").overrides == {}


async def test_overrides_of_a_failed_load_are_dropped():
    async with Harness() as harness:
        overridable(harness)
        harness.models["a"].fault = InvalidRequest("out of memory")
        with pytest.raises(InvalidRequest, match="out of memory"):
            await harness.scheduler.load("a", {"n_ctx": 10**6})
        harness.models["a"].fault = None
        await harness.scheduler.load("a")
        assert (harness.snapshot("a").caches["main"].window, harness.snapshot("a").overrides) == (100, {})


async def test_bad_overrides_change_nothing():
    async with Harness() as harness:
        harness.add_model("b")
        with pytest.raises(InvalidRequest, match="allows no overrides"):
            harness.scheduler.load("b", {"n_ctx": 1})
        overridable(harness)
        harness.add_model("b")
        with pytest.raises(InvalidRequest, match="unknown"):
            harness.scheduler.load("a", {"colour": "red"})
        assert harness.states() == {"a": "stopped", "b": "stopped"}


# --- drain and scale ---


async def test_a_draining_model_finishes_its_requests_and_takes_no_new_ones():
    async with Harness() as harness:
        model = await harness.load_model("a")
        held, waiting = await harness.request("a").lease(), harness.request("a")
        drained = harness.scheduler.drain("a")
        with pytest.raises(Unavailable) as refused:
            harness.request("a")
        assert refused.value.code == "model_draining"
        held.release()
        (await waiting.lease()).release()
        await drained
        assert (harness.snapshot("a").state, model.open) == ("draining", 1)
        await harness.scheduler.load("a")
        assert harness.request("a").granted
        assert len(model.engines) == 1


async def test_a_stopped_model_cannot_be_drained():
    async with Harness() as harness:
        harness.add_model("a")
        with pytest.raises(Conflict):
            harness.scheduler.drain("a")


async def test_scaling_starts_and_stops_replicas():
    async with Harness() as harness:
        model = harness.add_model("a", replica_max=3)
        await harness.scheduler.scale("a", 3)
        assert (model.open, harness.snapshot("a").slots) == (3, 3)
        held = [await harness.request("a").lease() for _ in range(3)]
        assert len({lease.engine for lease in held}) == 3
        fewer = harness.scheduler.scale("a", 1)
        held[0].release()
        held[1].release()
        held[2].release()
        await fewer
        assert (model.open, harness.snapshot("a").slots) == (1, 1)


@pytest.mark.parametrize("number", [0, -1, 4])
async def test_the_number_of_replicas_is_limited(number: int):
    async with Harness() as harness:
        harness.add_model("a", replica_max=3)
        with pytest.raises(InvalidRequest, match="1 to 3 replicas"):
            harness.scheduler.scale("a", number)


async def test_a_replica_that_fails_to_load_does_not_affect_the_others():
    async with Harness() as harness:
        model = await harness.load_model("a", replica_max=2)
        model.fault = InvalidRequest("out of memory")
        with pytest.raises(InvalidRequest, match="out of memory"):
            await harness.scheduler.scale("a", 2)
        assert (harness.snapshot("a").state, harness.snapshot("a").replicas_wanted) == ("ready", 1)
        assert "out of memory" in harness.snapshot("a").reason


# --- requests ---


async def test_requests_are_listed_oldest_first_with_their_state():
    async with Harness() as harness:
        await harness.load_model("a")
        harness.request("a", trace="t1", key="ann", tokens=7)
        await harness.clock.advance(2)
        harness.request("a", trace="t2")
        await harness.clock.advance(3)
        running, waiting = harness.scheduler.requests()
        assert (running.trace, running.state, running.position, running.replica) == ("t1", "running", 0, 1)
        assert (running.key, running.tokens, running.since) == ("ann", 7, EPOCH)
        assert (waiting.trace, waiting.state, waiting.position, waiting.waited) == ("t2", "waiting", 1, 3.0)
        assert harness.snapshot("a").wait_s == 3.0


async def test_waiting_and_running_requests_are_cancelled_by_trace():
    async with Harness() as harness:
        await harness.load_model("a")
        errors: list[ModelyardError] = []
        lease = await harness.request("a", trace="t1").lease()
        lease.on_revoke(errors.append)
        waiting = harness.request("a", trace="t2")
        harness.request("a")
        assert [harness.scheduler.cancel(trace) for trace in ("t1", "t2", "t3", "")] == [1, 1, 0, 0]
        assert isinstance(errors[0], Cancelled)
        with pytest.raises(Cancelled, match="administrator"):
            await waiting.lease()
        assert harness.snapshot("a").waiting == 1


# --- published changes ---


async def test_every_change_of_state_is_published():
    async with Harness() as harness:
        harness.add_model("a")
        changes = harness.scheduler.subscribe()
        await harness.scheduler.load("a")
        await harness.scheduler.unload("a")
        await harness.settle()
    errors = [(change.state, change.progress) async for change in changes]
    assert errors == [("loading", 0.0), ("loading", 0.5), ("ready", 1.0), ("draining", 0.0), ("stopped", 0.0)]


async def test_a_failure_is_published_with_its_reason():
    async with Harness() as harness:
        harness.add_model("a").fault = InvalidRequest("truncated file")
        changes = harness.scheduler.subscribe()
        harness.scheduler.load("a")
        await harness.wait_for_state("a", "failed")
        last = ModelStateChange(model="a", state="loading")
        while last.state != "failed":
            last = await anext(changes)
        assert (last.reason, last.at) == ("truncated file", EPOCH)


# --- a new configuration ---


async def test_a_removed_model_finishes_its_requests():
    async with Harness() as harness:
        model = harness.add_model("a")
        harness.add_model("b")
        for name in ("a", "b"):
            await harness.scheduler.load(name)
        held, waiting = await harness.request("a").lease(), harness.request("a")
        harness.scheduler.reconfigure({"b": harness.scheduler._models["b"].spec})
        with pytest.raises(NotFound):
            harness.request("a")
        await harness.settle()
        assert [model.name for model in harness.scheduler.snapshot().retiring] == ["a"]
        held.release()
        (await waiting.lease()).release()
        await until(lambda: not model.open)
        await harness.settle()
        assert harness.scheduler.snapshot().retiring == ()


async def test_a_model_with_a_new_identity_loads_beside_its_old_engine():
    async with Harness() as harness:
        harness.scheduler.reconfigure({"a": harness.spec("a", identity="1")})
        old = harness.models["a"]
        await harness.scheduler.load("a")
        held = await harness.request("a").lease()
        harness.scheduler.reconfigure({"a": harness.spec("a", identity="2")})
        assert (await harness.request("a").lease()).engine is harness.models["a"].engines[0]
        assert old.open == 1
        held.release()
        await until(lambda: not old.open)


async def test_a_new_engine_waits_for_the_old_one_if_both_do_not_fit():
    async with Harness(limit=10, linger_s=0.0) as harness:
        harness.scheduler.reconfigure({"a": harness.spec("a", size=6, identity="1")})
        old = harness.models["a"]
        await harness.scheduler.load("a")
        held = await harness.request("a").lease()
        harness.scheduler.reconfigure({"a": harness.spec("a", size=6, identity="2")})
        ticket = harness.request("a")
        await harness.settle()
        assert (old.open, harness.models["a"].engines) == (1, [])
        held.release()
        assert (await ticket.lease()).engine is harness.models["a"].engines[0]
        assert old.open == 0


async def test_an_unchanged_engine_keeps_running_with_the_new_settings():
    async with Harness() as harness:
        harness.scheduler.reconfigure({"a": harness.spec("a", identity="1", parallel=4, target_inflight=1)})
        model = harness.models["a"]
        await harness.scheduler.load("a")
        harness.request("a")
        assert not harness.request("a").granted
        changed = harness.spec("a", identity="1", parallel=4, target_inflight=3, replicas=1, idle_ttl_s=5.0)
        harness.scheduler.reconfigure({"a": changed})
        assert harness.request("a").granted
        assert (harness.snapshot("a").running, harness.snapshot("a").waiting, len(model.engines)) == (3, 0, 1)
        assert harness.snapshot("a").idle_ttl_s == 5.0


async def test_models_are_listed_in_the_order_of_the_new_configuration():
    async with Harness() as harness:
        harness.scheduler.reconfigure({name: harness.spec(name, identity=name) for name in "ab"})
        harness.scheduler.reconfigure({name: harness.spec(name, identity=name) for name in "cba"})
        assert list(harness.states()) == ["c", "b", "a"]


async def test_a_reload_loads_new_models_that_are_enabled():
    async with Harness() as harness:
        harness.scheduler.reconfigure({"a": harness.spec("a", identity="a", enabled=True)})
        assert harness.states() == {"a": "stopped"}  # at the start the server preloads
        harness.scheduler.reconfigure(
            {name: harness.spec(name, identity=name, enabled=name == "b") for name in ("a", "b", "c")}
        )
        await harness.wait_for_state("b", "ready")
        assert harness.states() == {"a": "stopped", "b": "ready", "c": "stopped"}


@pytest.mark.parametrize("identity", ["same", "other"])
async def test_a_reload_gives_a_failed_model_another_try(identity):
    async with Harness() as harness:
        harness.scheduler.reconfigure({"a": harness.spec("a", identity="same")})
        harness.models["a"].fault = InvalidRequest("broken")
        with pytest.raises(InvalidRequest):
            await harness.scheduler.load("a")
        assert harness.states() == {"a": "failed"}
        harness.scheduler.reconfigure({"a": harness.spec("a", identity=identity)})
        await harness.wait_for_state("a", "ready")


async def test_used_memory_is_shown_by_device():
    async with Harness(limit=10) as harness:
        await harness.load_model("a", size=6)
        snapshot = harness.scheduler.snapshot()
        assert [(d.device, d.limit, d.taken) for d in snapshot.devices] == [("cpu", 10, 6)]
        assert snapshot.models["a"].estimate == MemoryEstimate(weights=6)
