"""Loading, memory, sleep and crashes of models, with fake engines and a fake clock."""

from __future__ import annotations

import math

import pytest

from modelyard.core.errors import Conflict, InvalidRequest, Unavailable
from tests.scheduler.harness import Harness, until

# --- loading ---


async def test_a_request_loads_an_autoload_model():
    async with Harness() as harness:
        model = harness.add_model("a", autoload=True)
        ticket = harness.request("a")
        assert harness.states() == {"a": "loading"}
        assert (await ticket.lease()).engine is model.engines[0]
        assert harness.snapshot("a").loads == 1


async def test_requests_during_a_load_share_it():
    async with Harness() as harness:
        model = harness.add_model("a", autoload=True, parallel=3)
        model.gate.clear()
        first = harness.request("a")
        await harness.settle()
        rest = [harness.request("a"), harness.request("a")]
        model.gate.set()
        leases = [await ticket.lease() for ticket in (first, *rest)]
        assert {lease.engine for lease in leases} == {model.engines[0]}
        assert len(model.engines) == 1


async def test_a_request_cancelled_at_once_never_starts_a_load():
    async with Harness() as harness:
        model = harness.add_model("a", autoload=True)
        harness.request("a").cancel()
        await harness.settle()
        assert model.engines == []
        assert harness.states() == {"a": "stopped"}


async def test_a_started_load_continues_when_its_waiter_leaves():
    async with Harness() as harness:
        model = harness.add_model("a", autoload=True)
        model.gate.clear()
        ticket = harness.request("a")
        await harness.settle()
        ticket.cancel()
        model.gate.set()
        await harness.wait_for_state("a", "ready")


async def test_a_failed_load_affects_only_its_model():
    async with Harness() as harness:
        bad, _ = harness.add_model("bad"), harness.add_model("good")
        bad.fault = InvalidRequest("truncated file")
        for name in ("bad", "good"):
            harness.scheduler.preload(name)
        await until(lambda: harness.states() == {"bad": "failed", "good": "ready"})
        assert harness.snapshot("bad").reason == "truncated file"
        assert harness.snapshot("bad").failures == 1


async def test_a_failed_autoload_model_is_tried_again_after_a_minute():
    async with Harness() as harness:
        model = harness.add_model("a", autoload=True)
        model.fault = InvalidRequest("truncated file")
        with pytest.raises(Unavailable, match="truncated file"):
            await harness.request("a").lease()
        await harness.clock.advance(45)
        with pytest.raises(Unavailable, match="truncated file") as refused:
            harness.request("a")
        assert refused.value.retry_after == pytest.approx(15)
        model.fault = None
        await harness.clock.advance(16)
        assert (await harness.request("a").lease()).engine is model.engines[1]


async def test_a_load_that_takes_too_long_fails():
    async with Harness(load_timeout_s=0.0) as harness:
        model = harness.add_model("a")
        model.gate.clear()
        harness.scheduler.preload("a")
        await harness.wait_for_state("a", "failed")
        assert "load_timeout_s" in harness.snapshot("a").reason
        assert model.open == 0


async def test_a_model_larger_than_the_limit_fails_with_the_numbers():
    async with Harness(limit=10 * 2**20) as harness:
        model = harness.add_model("a", size=11 * 2**20, autoload=True)
        with pytest.raises(Unavailable, match="needs about 11 MiB and the limit is 10 MiB"):
            await harness.request("a").lease()
        assert model.engines == []


# --- memory ---


async def test_a_preloaded_model_that_does_not_fit_sleeps_until_the_first_request():
    async with Harness(limit=10) as harness:
        harness.add_model("a", size=6)
        harness.add_model("b", size=6)
        for name in ("a", "b"):
            harness.scheduler.preload(name)
        await until(lambda: harness.states() == {"a": "ready", "b": "stopped"})
        assert harness.snapshot("b").loads_on_request
        assert "not enough free memory" in harness.snapshot("b").reason
        await harness.clock.advance(5)
        await harness.request("b").lease()
        assert harness.states() == {"a": "stopped", "b": "ready"}
        assert harness.snapshot("a").loads_on_request  # evicted, not unloaded: the next request loads it
        assert harness.snapshot("a").evictions == 1


async def test_a_busy_model_drains_before_it_is_evicted():
    async with Harness(limit=10, patience_s=10.0) as harness:
        a, b = await harness.load_model("a", size=6), harness.add_model("b", size=6, autoload=True)
        held = await harness.request("a").lease()
        ticket = harness.request("b")
        await harness.clock.advance(10)
        assert not a.engines[0].closed
        assert [one.state for one in harness.snapshot("a").replicas] == ["draining"]
        assert harness.snapshot("b").phase == "waiting for memory"
        held.release()
        assert (await ticket.lease()).engine is b.engines[0]
        assert a.engines[0].closed


async def test_a_model_that_has_just_become_idle_lingers():
    async with Harness(limit=10, linger_s=1.0) as harness:
        a, b = await harness.load_model("a", size=6), harness.add_model("b", size=6, autoload=True)
        (await harness.request("a").lease()).release()
        ticket = harness.request("b")
        await harness.clock.advance(0.5)
        (await harness.request("a").lease()).release()
        await harness.clock.advance(0.9)
        assert (a.open, len(b.engines)) == (1, 0)
        await harness.clock.advance(0.2)
        assert (await ticket.lease()).engine is b.engines[0]


async def test_two_clients_of_two_models_that_do_not_fit_do_not_thrash():
    """Each client sends its next request at once, for a hundred seconds; each request runs for half a second."""
    async with Harness(limit=10, patience_s=10.0, linger_s=1.0) as harness:
        for name in ("a", "b"):
            harness.add_model(name, size=6, autoload=True)
        tickets = {name: harness.request(name) for name in ("a", "b")}
        served = dict.fromkeys(tickets, 0)
        for _ in range(200):
            await harness.clock.advance(0.5)
            for name, ticket in tickets.items():
                if ticket.granted:
                    ticket.cancel()
                    served[name] += 1
                    tickets[name] = harness.request(name)
        loads = {name: harness.snapshot(name).loads for name in tickets}
        for ticket in tickets.values():
            ticket.cancel()
    assert all(number >= 60 for number in served.values()), served
    assert all(4 <= number <= 6 for number in loads.values()), loads


async def test_an_eviction_is_undone_when_its_waiter_leaves():
    async with Harness(limit=10, patience_s=10.0) as harness:
        a, b = await harness.load_model("a", size=6), harness.add_model("b", size=6, autoload=True)
        held = await harness.request("a").lease()
        ticket, next_ = harness.request("b"), harness.request("a")
        await harness.clock.advance(10)
        assert [one.state for one in harness.snapshot("a").replicas] == ["draining"]
        ticket.cancel()
        await harness.settle()
        assert harness.states() == {"a": "ready", "b": "stopped"}
        held.release()
        assert (await next_.lease()).engine is a.engines[0]
        assert b.engines == []


async def test_three_models_that_do_not_fit_together_take_turns():
    async with Harness(limit=10, linger_s=0.0) as harness:
        models = [harness.add_model(name, size=6, autoload=True) for name in "abc"]
        tickets = [harness.request(name) for name in "abcabc"]
        for ticket in (tickets[i] for i in (0, 3, 1, 4, 2, 5)):
            (await ticket.lease()).release()
        assert [len(model.engines) for model in models] == [1, 1, 1]


async def test_a_small_model_does_not_wait_for_a_large_one():
    async with Harness(limit=10) as harness:
        for name, size in (("a", 6), ("large", 8), ("small", 3)):
            harness.add_model(name, size=size, autoload=True)
        held = await harness.request("a").lease()
        large = harness.request("large")
        assert await harness.request("small").lease()
        assert not large.granted
        held.release()


async def test_an_idle_model_sleeps_after_its_ttl_and_loads_on_the_next_request():
    async with Harness() as harness:
        model = await harness.load_model("a", idle_ttl_s=60.0)
        await harness.clock.advance(30)
        held = await harness.request("a").lease()
        await harness.clock.advance(100)
        assert harness.states() == {"a": "ready"}
        held.release()
        await harness.clock.advance(59)
        assert harness.states() == {"a": "ready"}
        await harness.clock.advance(2)
        assert harness.states() == {"a": "stopped"}
        assert harness.snapshot("a").reason == "no requests for 60 s"
        assert (await harness.request("a").lease()).engine is model.engines[1]


async def test_the_last_request_says_how_long_an_idle_model_stays():
    async with Harness() as harness:
        await harness.load_model("a", idle_ttl_s=60.0)
        for keep_alive, stays_s in ((math.inf, 10**6), (600.0, 590), (5.0, 4), (None, 55)):
            (await harness.request("a", keep_alive=keep_alive).lease()).release()
            await harness.clock.advance(stays_s)
            assert harness.states() == {"a": "ready"}
        await harness.clock.advance(10)
        assert harness.states() == {"a": "stopped"}
        (await harness.request("a", keep_alive=0.0).lease()).release()
        await harness.clock.advance(1)
        assert harness.states() == {"a": "stopped"}


async def test_a_model_without_a_ttl_stays_loaded():
    async with Harness() as harness:
        await harness.load_model("a")
        await harness.clock.advance(10**6)
        assert harness.states() == {"a": "ready"}


# --- crashes ---


async def test_a_lost_replica_does_not_affect_the_others():
    async with Harness() as harness:
        model = harness.add_model("a", replicas=2)
        await harness.scheduler.load("a")
        await until(
            lambda: (
                len(harness.snapshot("a").replicas)
                == 2
                == sum(r.state == "ready" for r in harness.snapshot("a").replicas)
            )
        )
        model.gate.clear()
        model.engines[0].lost.set_result(Unavailable("killed"))
        await harness.settle()
        assert harness.states() == {"a": "ready"}
        assert (await harness.request("a").lease()).engine is model.engines[1]
        waiting = harness.request("a")
        assert not waiting.granted
        model.gate.set()
        assert (await waiting.lease()).engine is model.engines[2]


async def test_an_engine_that_keeps_dying_is_reopened_with_growing_delays_and_then_given_up():
    async with Harness(timeout_s=1000.0) as harness:
        model = await harness.load_model("a")
        model.gate.set()
        for made, delay in ((1, 0.0), (2, 0.5), (3, 2.0), (4, 5.0)):
            model.engines[-1].lost.set_result(Unavailable("killed"))
            if delay:
                await harness.clock.advance(delay - 0.1)
                assert len(model.engines) == made
            await harness.clock.advance(0.1)
            assert len(model.engines) == made + 1
        model.engines[-1].lost.set_result(Unavailable("killed"))
        await harness.settle()
        assert harness.states() == {"a": "failed"}
        assert harness.snapshot("a").reason == "killed"


async def test_an_engine_that_served_requests_starts_a_new_restart_count():
    async with Harness() as harness:
        model = await harness.load_model("a")
        for number in range(10):
            (await harness.request("a").lease()).release()
            model.engines[-1].lost.set_result(Unavailable("killed"))
            await until(lambda number=number: len(model.engines) == number + 2 and harness.states() == {"a": "ready"})


async def test_an_engine_lost_while_it_drains_is_removed():
    async with Harness() as harness:
        model = await harness.load_model("a")
        held = await harness.request("a").lease()
        gone = harness.scheduler.unload("a")
        model.engines[0].lost.set_result(Unavailable("killed"))
        await gone
        held.release()
        assert harness.states() == {"a": "stopped"}
        with pytest.raises(Conflict):
            harness.request("a")
