"""The life of models and their replicas, driven by a clock that the test moves."""

from __future__ import annotations

import pytest

from modelyard.core.errors import Conflict, InvalidRequest, Unavailable
from tests.scheduler.stage import Stage, until

# --- loading ---


async def test_a_request_loads_a_model_that_says_so():
    async with Stage() as stage:
        act = stage.model("a", autoload=True)
        ticket = stage.ask("a")
        assert stage.states() == {"a": "loading"}
        assert (await ticket.lease()).engine is act.engines[0]
        assert stage.of("a").loads == 1


async def test_requests_that_come_while_it_loads_share_that_load():
    async with Stage() as stage:
        act = stage.model("a", autoload=True, parallel=3)
        act.gate.clear()
        first = stage.ask("a")
        await stage.settle()
        rest = [stage.ask("a"), stage.ask("a")]
        act.gate.set()
        leases = [await ticket.lease() for ticket in (first, *rest)]
        assert {lease.engine for lease in leases} == {act.engines[0]}
        assert len(act.engines) == 1


async def test_a_waiter_that_leaves_at_once_never_starts_a_load():
    async with Stage() as stage:
        act = stage.model("a", autoload=True)
        stage.ask("a").cancel()
        await stage.settle()
        assert act.engines == []
        assert stage.states() == {"a": "stopped"}


async def test_a_load_that_began_goes_on_when_its_waiter_leaves():
    async with Stage() as stage:
        act = stage.model("a", autoload=True)
        act.gate.clear()
        ticket = stage.ask("a")
        await stage.settle()
        ticket.cancel()
        act.gate.set()
        await stage.becomes("a", "ready")


async def test_one_failed_load_is_that_models_alone():
    async with Stage() as stage:
        bad, _ = stage.model("bad"), stage.model("good")
        bad.fault = InvalidRequest("truncated file")
        for name in ("bad", "good"):
            stage.scheduler.preload(name)
        await until(lambda: stage.states() == {"bad": "failed", "good": "ready"})
        assert stage.of("bad").reason == "truncated file"
        assert stage.of("bad").failures == 1


async def test_a_failed_model_that_requests_load_gets_another_try_after_a_minute():
    async with Stage() as stage:
        act = stage.model("a", autoload=True)
        act.fault = InvalidRequest("truncated file")
        with pytest.raises(Unavailable, match="truncated file"):
            await stage.ask("a").lease()
        await stage.clock.pass_(45)
        with pytest.raises(Unavailable, match="truncated file") as refused:
            stage.ask("a")
        assert refused.value.retry_after == pytest.approx(15)
        act.fault = None
        await stage.clock.pass_(16)
        assert (await stage.ask("a").lease()).engine is act.engines[1]


async def test_a_load_that_takes_too_long_fails():
    async with Stage(load_timeout_s=0.0) as stage:
        act = stage.model("a")
        act.gate.clear()
        stage.scheduler.preload("a")
        await stage.becomes("a", "failed")
        assert "load_timeout_s" in stage.of("a").reason
        assert act.open == 0


async def test_a_model_that_is_larger_than_the_limit_fails_with_the_numbers():
    async with Stage(limit=10 * 2**20) as stage:
        act = stage.model("a", size=11 * 2**20, autoload=True)
        with pytest.raises(Unavailable, match="needs about 11 MiB and the limit is 10 MiB"):
            await stage.ask("a").lease()
        assert act.engines == []


# --- memory ---


async def test_at_start_what_does_not_fit_sleeps_until_it_is_asked_for():
    async with Stage(limit=10) as stage:
        stage.model("a", size=6)
        stage.model("b", size=6)
        for name in ("a", "b"):
            stage.scheduler.preload(name)
        await until(lambda: stage.states() == {"a": "ready", "b": "stopped"})
        assert stage.of("b").loads_on_request
        assert "not enough free memory" in stage.of("b").reason
        await stage.clock.pass_(5)
        await stage.ask("b").lease()
        assert stage.states() == {"a": "stopped", "b": "ready"}
        assert stage.of("a").loads_on_request  # nobody unloaded it: it comes back
        assert stage.of("a").evictions == 1


async def test_a_busy_model_is_not_stopped_and_answers_to_its_end():
    async with Stage(limit=10, patience_s=10.0) as stage:
        a, b = stage.model("a", size=6), stage.model("b", size=6, autoload=True)
        await stage.up("a")
        held = await stage.ask("a").lease()
        ticket = stage.ask("b")
        await stage.clock.pass_(10)
        assert not a.engines[0].closed
        assert [one.state for one in stage.of("a").replicas] == ["draining"]
        assert stage.of("b").doing == "waiting for memory"
        held.release()
        assert (await ticket.lease()).engine is b.engines[0]
        assert a.engines[0].closed


async def test_one_that_just_became_idle_lingers_for_its_client():
    async with Stage(limit=10, linger_s=1.0) as stage:
        a, b = stage.model("a", size=6), stage.model("b", size=6, autoload=True)
        await stage.up("a")
        (await stage.ask("a").lease()).release()
        ticket = stage.ask("b")
        await stage.clock.pass_(0.5)
        (await stage.ask("a").lease()).release()
        await stage.clock.pass_(0.9)
        assert (a.open, len(b.engines)) == (1, 0)
        await stage.clock.pass_(0.2)
        assert (await ticket.lease()).engine is b.engines[0]


async def test_two_clients_of_two_models_that_do_not_fit_do_not_thrash():
    """Each client asks again as soon as it is answered, for a hundred seconds; each answer takes half a second."""
    async with Stage(limit=10, patience_s=10.0, linger_s=1.0) as stage:
        for name in ("a", "b"):
            stage.model(name, size=6, autoload=True)
        tickets = {name: stage.ask(name) for name in ("a", "b")}
        answered = dict.fromkeys(tickets, 0)
        for _ in range(200):
            await stage.clock.pass_(0.5)
            for name, ticket in tickets.items():
                if ticket.granted:
                    ticket.cancel()
                    answered[name] += 1
                    tickets[name] = stage.ask(name)
        loads = {name: stage.of(name).loads for name in tickets}
        for ticket in tickets.values():
            ticket.cancel()
    assert all(number >= 60 for number in answered.values()), answered
    assert all(4 <= number <= 6 for number in loads.values()), loads


async def test_a_waiter_that_leaves_withdraws_its_claim_and_the_other_goes_on():
    async with Stage(limit=10, patience_s=10.0) as stage:
        a, b = stage.model("a", size=6), stage.model("b", size=6, autoload=True)
        await stage.up("a")
        held = await stage.ask("a").lease()
        ticket, next_ = stage.ask("b"), stage.ask("a")
        await stage.clock.pass_(10)
        assert [one.state for one in stage.of("a").replicas] == ["draining"]
        ticket.cancel()
        await stage.settle()
        assert stage.states() == {"a": "ready", "b": "stopped"}
        held.release()
        assert (await next_.lease()).engine is a.engines[0]
        assert b.engines == []


async def test_three_models_that_do_not_fit_all_get_their_turn():
    async with Stage(limit=10, linger_s=0.0) as stage:
        acts = [stage.model(name, size=6, autoload=True) for name in "abc"]
        tickets = [stage.ask(name) for name in "abcabc"]
        for ticket in (tickets[i] for i in (0, 3, 1, 4, 2, 5)):
            (await ticket.lease()).release()
        assert [len(act.engines) for act in acts] == [1, 1, 1]


async def test_a_small_model_does_not_wait_for_a_large_one():
    async with Stage(limit=10) as stage:
        for name, size in (("a", 6), ("large", 8), ("small", 3)):
            stage.model(name, size=size, autoload=True)
        held = await stage.ask("a").lease()
        large = stage.ask("large")
        assert await stage.ask("small").lease()
        assert not large.granted
        held.release()


async def test_an_idle_model_is_put_to_sleep_and_comes_back_when_asked_for():
    async with Stage() as stage:
        act = stage.model("a", idle_ttl_s=60.0)
        await stage.up("a")
        await stage.clock.pass_(30)
        held = await stage.ask("a").lease()
        await stage.clock.pass_(100)
        assert stage.states() == {"a": "ready"}
        held.release()
        await stage.clock.pass_(59)
        assert stage.states() == {"a": "ready"}
        await stage.clock.pass_(2)
        assert stage.states() == {"a": "stopped"}
        assert stage.of("a").reason == "no requests for 60 s"
        assert (await stage.ask("a").lease()).engine is act.engines[1]


async def test_a_model_without_a_ttl_stays():
    async with Stage() as stage:
        stage.model("a")
        await stage.up("a")
        await stage.clock.pass_(10**6)
        assert stage.states() == {"a": "ready"}


# --- crashes ---


async def test_a_crash_of_one_replica_leaves_the_others_at_work():
    async with Stage() as stage:
        act = stage.model("a", replicas=2)
        await stage.scheduler.load("a")
        await until(lambda: len(stage.of("a").replicas) == 2 == sum(r.state == "ready" for r in stage.of("a").replicas))
        act.gate.clear()
        act.engines[0].lost.set_result(Unavailable("killed"))
        await stage.settle()
        assert stage.states() == {"a": "ready"}
        assert (await stage.ask("a").lease()).engine is act.engines[1]
        waiting = stage.ask("a")
        assert not waiting.granted
        act.gate.set()
        assert (await waiting.lease()).engine is act.engines[2]


async def test_an_engine_that_dies_again_and_again_is_reopened_ever_later_and_then_given_up():
    async with Stage(timeout_s=1000.0) as stage:
        act = stage.model("a")
        await stage.up("a")
        act.gate.set()
        for made, delay in ((1, 0.0), (2, 0.5), (3, 2.0), (4, 5.0)):
            act.engines[-1].lost.set_result(Unavailable("killed"))
            if delay:
                await stage.clock.pass_(delay - 0.1)
                assert len(act.engines) == made
            await stage.clock.pass_(0.1)
            assert len(act.engines) == made + 1
        act.engines[-1].lost.set_result(Unavailable("killed"))
        await stage.settle()
        assert stage.states() == {"a": "failed"}
        assert stage.of("a").reason == "killed"


async def test_a_death_after_work_begins_a_new_count():
    async with Stage() as stage:
        act = stage.model("a")
        await stage.up("a")
        for number in range(10):
            (await stage.ask("a").lease()).release()
            act.engines[-1].lost.set_result(Unavailable("killed"))
            await until(lambda number=number: len(act.engines) == number + 2 and stage.states() == {"a": "ready"})


async def test_an_engine_lost_while_it_drains_is_gone():
    async with Stage() as stage:
        act = stage.model("a")
        await stage.up("a")
        held = await stage.ask("a").lease()
        gone = stage.scheduler.unload("a")
        act.engines[0].lost.set_result(Unavailable("killed"))
        await gone
        held.release()
        assert stage.states() == {"a": "stopped"}
        with pytest.raises(Conflict):
            stage.ask("a")
