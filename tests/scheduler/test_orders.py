"""What administrators order, and what becomes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, MemoryEstimate
from modelyard.core.errors import Cancelled, Conflict, InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.pool import ModelStateChange
from tests.scheduler.stage import EPOCH, Stage, until

# --- load and unload ---


async def test_a_load_is_done_when_the_model_is_ready():
    async with Stage() as stage:
        act = stage.model("a")
        act.gate.clear()
        first, second = stage.scheduler.load("a"), stage.scheduler.load("a")
        await stage.settle()
        assert not first.done()
        assert (stage.of("a").state, stage.of("a").progress, stage.of("a").doing) == ("loading", 0.5, "half way")
        act.gate.set()
        await asyncio.gather(first, second)
        assert len(act.engines) == 1
        await stage.scheduler.load("a")


async def test_a_load_that_fails_says_why_to_whoever_waits_for_it():
    async with Stage() as stage:
        stage.model("a").fault = InvalidRequest("truncated file")
        with pytest.raises(InvalidRequest, match="truncated file"):
            await stage.scheduler.load("a")
        stage.acts["a"].fault = None
        await stage.scheduler.load("a")
        assert stage.of("a").reason == ""


async def test_an_unknown_model_is_not_found():
    async with Stage() as stage:
        for order in (stage.scheduler.load, stage.scheduler.unload, stage.scheduler.drain, stage.scheduler.engines):
            with pytest.raises(NotFound):
                order("nobody")


async def test_a_load_drives_an_idle_model_out():
    async with Stage(limit=10) as stage:
        stage.model("a", size=6)
        stage.model("b", size=6)
        await stage.up("a")
        await stage.clock.pass_(5)
        await stage.scheduler.load("b")
        assert stage.states() == {"a": "stopped", "b": "ready"}


async def test_unloading_lets_those_who_run_finish_and_refuses_those_who_wait():
    async with Stage() as stage:
        act = stage.model("a")
        await stage.up("a")
        held, waiting = await stage.ask("a").lease(), stage.ask("a")
        gone = stage.scheduler.unload("a")
        with pytest.raises(Unavailable, match="was unloaded"):
            await waiting.lease()
        with pytest.raises(Conflict, match="not loaded"):
            stage.ask("a")
        await stage.settle()
        assert (stage.of("a").state, act.open, gone.done()) == ("draining", 1, False)
        held.release()
        await gone
        assert (stage.of("a").state, act.open) == ("stopped", 0)


async def test_unloading_by_force_ends_those_who_run():
    async with Stage() as stage:
        act = stage.model("a", parallel=2)
        await stage.up("a")
        told: list[ModelyardError] = []
        held, other = await stage.ask("a").lease(), await stage.ask("a").lease()
        held.on_revoke(told.append)
        await stage.scheduler.unload("a", force=True)
        other.on_revoke(told.append)  # whoever had not begun yet hears of it when he does
        assert [error.code for error in told] == ["model_unloaded"] * 2
        assert act.open == 0
        held.release()
        other.release()
        assert stage.of("a").running == 0


async def test_unloading_while_it_loads_ends_the_load():
    async with Stage() as stage:
        act = stage.model("a")
        act.gate.clear()
        loading = stage.scheduler.load("a")
        await stage.settle()
        await stage.scheduler.unload("a")
        with pytest.raises(Conflict, match="before it was ready"):
            await loading
        assert (stage.of("a").state, act.open) == ("stopped", 0)


async def test_unloading_what_is_not_loaded_is_done_at_once():
    async with Stage() as stage:
        stage.model("a")
        await stage.scheduler.unload("a")
        assert stage.states() == {"a": "stopped"}


async def test_a_model_that_loads_on_request_does_so_while_its_old_engine_drains():
    async with Stage() as stage:
        act = stage.model("a", autoload=True)
        held = await stage.ask("a").lease()
        stage.scheduler.unload("a")
        assert (await stage.ask("a").lease()).engine is act.engines[1]
        held.release()
        await until(lambda: act.engines[0].closed)


async def test_nobody_has_to_wait_for_an_order():
    async with Stage() as stage:
        stage.model("a").fault = InvalidRequest("truncated file")
        stage.scheduler.load("a")
        await stage.becomes("a", "failed")


async def test_orders_to_a_closed_scheduler_are_refused_and_pending_ones_end():
    stage = Stage()
    stage.model("a").gate.clear()
    pending = stage.scheduler.load("a")
    await stage.scheduler.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await pending
    with pytest.raises(Unavailable, match="shutting down"):
        stage.scheduler.load("a")


# --- overrides ---


def overridable(stage: Stage) -> None:
    blueprint = stage.blueprint("a")

    def altered(overrides: Any) -> Any:
        if "n_ctx" not in overrides:
            raise InvalidRequest("unknown")
        return replace(blueprint, caches={"main": CacheInfo(overrides["n_ctx"])})

    stage.scheduler._manager.add(replace(blueprint, altered=altered))


async def test_overrides_hold_until_the_next_unload():
    async with Stage() as stage:
        overridable(stage)
        await stage.scheduler.load("a", {"n_ctx": 64})
        assert stage.of("a").caches["main"].window == 64
        assert stage.of("a").overrides == {"n_ctx": 64}
        await stage.scheduler.load("a", {"n_ctx": 64})
        with pytest.raises(Conflict, match="unload it first"):
            stage.scheduler.load("a", {"n_ctx": 65})
        await stage.scheduler.unload("a")
        await stage.scheduler.load("a")
        assert stage.of("a").caches["main"].window == 100
        assert stage.of("a").overrides == {}


async def test_overrides_of_a_load_that_failed_do_not_outlive_it():
    async with Stage() as stage:
        overridable(stage)
        stage.acts["a"].fault = InvalidRequest("out of memory")
        with pytest.raises(InvalidRequest, match="out of memory"):
            await stage.scheduler.load("a", {"n_ctx": 10**6})
        stage.acts["a"].fault = None
        await stage.scheduler.load("a")
        assert (stage.of("a").caches["main"].window, stage.of("a").overrides) == (100, {})


async def test_bad_overrides_change_nothing():
    async with Stage() as stage:
        overridable(stage)
        stage.model("b")
        with pytest.raises(InvalidRequest, match="unknown"):
            stage.scheduler.load("a", {"colour": "red"})
        with pytest.raises(InvalidRequest, match="allows no overrides"):
            stage.scheduler.load("b", {"n_ctx": 1})
        assert stage.states() == {"a": "stopped", "b": "stopped"}


# --- drain and scale ---


async def test_a_drained_model_answers_those_who_came_and_takes_nobody_else():
    async with Stage() as stage:
        act = stage.model("a")
        await stage.up("a")
        held, waiting = await stage.ask("a").lease(), stage.ask("a")
        drained = stage.scheduler.drain("a")
        with pytest.raises(Unavailable) as refused:
            stage.ask("a")
        assert refused.value.code == "model_draining"
        held.release()
        (await waiting.lease()).release()
        await drained
        assert (stage.of("a").state, act.open) == ("draining", 1)
        await stage.scheduler.load("a")
        assert stage.ask("a").granted
        assert len(act.engines) == 1


async def test_what_is_not_loaded_cannot_be_drained():
    async with Stage() as stage:
        stage.model("a")
        with pytest.raises(Conflict):
            stage.scheduler.drain("a")


async def test_replicas_come_and_go_live():
    async with Stage() as stage:
        act = stage.model("a", replica_max=3)
        await stage.scheduler.scale("a", 3)
        assert (act.open, stage.of("a").places) == (3, 3)
        held = [await stage.ask("a").lease() for _ in range(3)]
        assert len({lease.engine for lease in held}) == 3
        fewer = stage.scheduler.scale("a", 1)
        held[0].release()
        held[1].release()
        held[2].release()
        await fewer
        assert (act.open, stage.of("a").places) == (1, 1)


@pytest.mark.parametrize("number", [0, -1, 4])
async def test_replicas_are_bounded(number: int):
    async with Stage() as stage:
        stage.model("a", replica_max=3)
        with pytest.raises(InvalidRequest, match="1 to 3 replicas"):
            stage.scheduler.scale("a", number)


async def test_a_replica_that_cannot_be_loaded_leaves_the_others_and_says_so():
    async with Stage() as stage:
        act = stage.model("a", replica_max=2)
        await stage.up("a")
        act.fault = InvalidRequest("out of memory")
        with pytest.raises(InvalidRequest, match="out of memory"):
            await stage.scheduler.scale("a", 2)
        assert (stage.of("a").state, stage.of("a").replicas_wanted) == ("ready", 1)
        assert "out of memory" in stage.of("a").reason


# --- requests ---


async def test_requests_are_listed_oldest_first_with_where_they_stand():
    async with Stage() as stage:
        stage.model("a")
        await stage.up("a")
        stage.ask("a", trace="t1", key="ann", tokens=7)
        await stage.clock.pass_(2)
        stage.ask("a", trace="t2")
        await stage.clock.pass_(3)
        running, waiting = stage.scheduler.requests()
        assert (running.trace, running.state, running.position, running.replica) == ("t1", "running", 0, 1)
        assert (running.key, running.tokens, running.since) == ("ann", 7, EPOCH)
        assert (waiting.trace, waiting.state, waiting.position, waiting.waited) == ("t2", "waiting", 1, 3.0)
        assert stage.of("a").wait_s == 3.0


async def test_a_request_is_cancelled_by_its_trace_wherever_it_stands():
    async with Stage() as stage:
        stage.model("a")
        await stage.up("a")
        told: list[ModelyardError] = []
        lease = await stage.ask("a", trace="t1").lease()
        lease.on_revoke(told.append)
        waiting = stage.ask("a", trace="t2")
        stage.ask("a")
        assert [stage.scheduler.cancel(trace) for trace in ("t1", "t2", "t3", "")] == [1, 1, 0, 0]
        assert isinstance(told[0], Cancelled)
        with pytest.raises(Cancelled, match="administrator"):
            await waiting.lease()
        assert stage.of("a").waiting == 1


# --- changes ---


async def test_every_change_of_state_is_told():
    async with Stage() as stage:
        stage.model("a")
        changes = stage.scheduler.subscribe()
        await stage.up("a")
        await stage.scheduler.unload("a")
        await stage.settle()
    told = [(change.state, change.progress) async for change in changes]
    assert told == [("loading", 0.0), ("loading", 0.5), ("ready", 1.0), ("draining", 0.0), ("stopped", 0.0)]


async def test_a_failure_is_told_with_its_reason():
    async with Stage() as stage:
        stage.model("a").fault = InvalidRequest("truncated file")
        changes = stage.scheduler.subscribe()
        stage.scheduler.load("a")
        await stage.becomes("a", "failed")
        last = ModelStateChange(model="a", state="loading")
        while last.state != "failed":
            last = await anext(changes)
        assert (last.reason, last.at) == ("truncated file", EPOCH)


# --- a new configuration ---


async def test_a_model_that_is_gone_answers_those_who_came_before():
    async with Stage() as stage:
        act = stage.model("a")
        stage.model("b")
        await stage.up("a", "b")
        held, waiting = await stage.ask("a").lease(), stage.ask("a")
        stage.scheduler.reconfigure({"b": stage.scheduler._models["b"].spec})
        with pytest.raises(NotFound):
            stage.ask("a")
        await stage.settle()
        assert [model.name for model in stage.scheduler.snapshot().retiring] == ["a"]
        held.release()
        (await waiting.lease()).release()
        await until(lambda: not act.open)
        await stage.settle()
        assert stage.scheduler.snapshot().retiring == ()


async def test_a_model_that_makes_another_engine_is_loaded_anew_beside_the_old():
    async with Stage() as stage:
        stage.scheduler.reconfigure({"a": stage.blueprint("a", identity="1")})
        old = stage.acts["a"]
        await stage.up("a")
        held = await stage.ask("a").lease()
        stage.scheduler.reconfigure({"a": stage.blueprint("a", identity="2")})
        assert (await stage.ask("a").lease()).engine is stage.acts["a"].engines[0]
        assert old.open == 1
        held.release()
        await until(lambda: not old.open)


async def test_where_old_and_new_do_not_fit_together_the_new_one_waits():
    async with Stage(limit=10, linger_s=0.0) as stage:
        stage.scheduler.reconfigure({"a": stage.blueprint("a", size=6, identity="1")})
        old = stage.acts["a"]
        await stage.up("a")
        held = await stage.ask("a").lease()
        stage.scheduler.reconfigure({"a": stage.blueprint("a", size=6, identity="2")})
        ticket = stage.ask("a")
        await stage.settle()
        assert (old.open, stage.acts["a"].engines) == (1, [])
        held.release()
        assert (await ticket.lease()).engine is stage.acts["a"].engines[0]
        assert old.open == 0


async def test_the_same_engine_goes_on_and_is_run_as_the_new_configuration_says():
    async with Stage() as stage:
        stage.scheduler.reconfigure({"a": stage.blueprint("a", identity="1", parallel=4, target_inflight=1)})
        act = stage.acts["a"]
        await stage.up("a")
        stage.ask("a")
        assert not stage.ask("a").granted
        changed = stage.blueprint("a", identity="1", parallel=4, target_inflight=3, replicas=1, idle_ttl_s=5.0)
        stage.scheduler.reconfigure({"a": changed})
        assert stage.ask("a").granted
        assert (stage.of("a").running, stage.of("a").waiting, len(act.engines)) == (3, 0, 1)
        assert stage.of("a").idle_ttl_s == 5.0


async def test_new_models_are_known_and_in_the_order_of_the_configuration():
    async with Stage() as stage:
        stage.scheduler.reconfigure({name: stage.blueprint(name, identity=name) for name in "ab"})
        stage.scheduler.reconfigure({name: stage.blueprint(name, identity=name) for name in "cba"})
        assert list(stage.states()) == ["c", "b", "a"]


async def test_a_model_that_a_reload_brings_is_loaded_if_it_is_enabled():
    async with Stage() as stage:
        stage.scheduler.reconfigure({"a": stage.blueprint("a", identity="a", enabled=True)})
        assert stage.states() == {"a": "stopped"}  # at the start the server says when
        stage.scheduler.reconfigure(
            {name: stage.blueprint(name, identity=name, enabled=name == "b") for name in ("a", "b", "c")}
        )
        await stage.becomes("b", "ready")
        assert stage.states() == {"a": "stopped", "b": "ready", "c": "stopped"}


async def test_what_the_pool_has_taken_is_shown_by_device():
    async with Stage(limit=10) as stage:
        stage.model("a", size=6)
        await stage.up("a")
        snapshot = stage.scheduler.snapshot()
        assert [(d.device, d.limit, d.taken) for d in snapshot.devices] == [("cpu", 10, 6)]
        assert snapshot.models["a"].estimate == MemoryEstimate(weights=6)
