"""The policy as tables: a pool, a time, and what is to be done. Bytes are small numbers; the limit is 10 of RAM."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.scheduler.policy import (
    EstimateMemory,
    KeepReplica,
    ModelView,
    PoolView,
    RejectModel,
    ReplicaView,
    ReserveMemory,
    SleepModel,
    StartReplica,
    StopReplica,
    plan,
)

NOW = 1000.0
LONG_AGO = 0.0


def replica(id: int, state: Any = "ready", size: int = 6, **more: Any) -> ReplicaView:
    return ReplicaView(id=id, state=state, bytes={"cpu": size} if size else {}, **more)


def model(name: str, *replicas: ReplicaView, need: int | None = 6, **more: Any) -> ModelView:
    needs = None if need is None else {"cpu": need} if need else {}
    return ModelView(**{"name": name, "need": needs, "replicas": replicas, "target": len(replicas)} | more)


def hungry(name: str, *replicas: ReplicaView, since: float | None = LONG_AGO, **more: Any) -> ModelView:
    """It should have one, and somebody waits for it."""
    waiting = 0 if since is None else 1
    return model(name, *replicas, **{"target": 1, "wanted_since": since, "waiting": waiting} | more)


def decided(*models: ModelView, now: float = NOW, limit: int | None = 10, soft: int | None = None) -> tuple[Any, ...]:
    view = PoolView(
        models=models,
        hard={} if limit is None else {"cpu": limit},
        soft={} if soft is None else {"cpu": soft},
        patience_s=10.0,
        linger_s=1.0,
    )
    made = plan(view, now)
    return (*made.actions, *([] if made.wake is None else [made.wake]))


IDLE = replica(1, idle_since=LONG_AGO)
BUSY = replica(1, running=1, ready_since=LONG_AGO)

TABLE: dict[str, tuple[tuple[ModelView, ...], tuple[Any, ...]]] = {
    "nothing to do": ((model("a", IDLE), model("b", target=0)), ()),
    # 1. surplus
    "too many: the idle one goes": (
        (model("a", replica(1, running=1, size=2), replica(2, size=2), target=1),),
        (StopReplica("a", 2),),
    ),
    "too many: the one still loading goes before one that answers": (
        (model("a", replica(1, size=2), replica(2, "loading", size=2), target=1),),
        (StopReplica("a", 2),),
    ),
    "too many: a claim goes first": (
        (model("a", replica(1, size=2), replica(2, "placing", size=2), target=1),),
        (StopReplica("a", 2),),
    ),
    "none wanted: all go": ((model("a", replica(1, running=3), target=0),), (StopReplica("a", 1),)),
    "those who leave already are not told again": (
        (model("a", replica(1, "draining", running=1), replica(2, "closing"), target=0),),
        (),
    ),
    # 2. idle
    "idle for its time: it sleeps": (
        (model("a", replica(1, idle_since=NOW - 60), idle_ttl_s=60.0),),
        (SleepModel("a", "no requests for 60 s"),),
    ),
    "idle, but not for long enough: look again then": (
        (model("a", replica(1, idle_since=NOW - 50), idle_ttl_s=60.0),),
        (NOW + 10,),
    ),
    "running things are not idle": ((model("a", replica(1, running=1), idle_ttl_s=60.0),), ()),
    "nor is one whose other replica runs": (
        (model("a", replica(1, size=2), replica(2, size=2, running=1), idle_ttl_s=60.0),),
        (),
    ),
    "nor one that an administrator waits for": ((model("a", IDLE, idle_ttl_s=60.0, wanted_since=NOW),), ()),
    # 3. hungry
    "3.2 nobody knows what it takes": ((hungry("a", need=None),), (EstimateMemory("a"),)),
    "3.4 it fits": ((hungry("a"),), (StartReplica("a"),)),
    "3.4 it takes nothing": ((hungry("a", need=0), model("b", replica(1, size=10))), (StartReplica("a"),)),
    "3.4 both replicas fit": ((hungry("a", need=5, target=2),), (StartReplica("a"), StartReplica("a"))),
    "3.4 only one of two fits beside it": ((hungry("a", need=6, target=2, since=None),), (StartReplica("a"),)),
    "3.5 nobody waits for it: it does not drive another out": (
        (model("a", IDLE), hungry("b", since=None)),
        (SleepModel("b", "not enough free memory beside the loaded models"),),
    ),
    "3.6 those who leave make room": (
        (model("a", replica(1, "closing"), target=0), hungry("b")),
        (ReserveMemory("b", "waiting for memory"),),
    ),
    "3.6 a claim waits on": (
        (model("a", replica(1, "closing"), target=0), hungry("b", replica(2, "placing"))),
        (),
    ),
    "3.7 an idle one goes": (
        (model("a", IDLE), hungry("b")),
        (StopReplica("a", 1, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.7 the longest unused of two goes": (
        (
            model("a", replica(1, idle_since=90, size=5)),
            model("c", replica(2, idle_since=80, size=5)),
            hungry("b", need=5),
        ),
        (StopReplica("c", 2, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.7 one that has just become idle lingers": (
        (model("a", replica(1, idle_since=NOW - 0.25, ready_since=NOW)), hungry("b", since=NOW)),
        (NOW + 0.75,),
    ),
    "3.8 a busy one stays while its turn lasts": (
        (model("a", replica(1, running=1, ready_since=NOW - 3)), hungry("b")),
        (NOW + 7,),
    ),
    "3.8 a turn lasts at least as long for those who came late": (
        (model("a", BUSY), hungry("b", since=NOW - 4)),
        (NOW + 6,),
    ),
    "3.8 its turn is over": (
        (model("a", BUSY), hungry("b", since=NOW - 10)),
        (StopReplica("a", 1, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.8 one whose requests wait is busy too": (
        (model("a", replica(1, idle_since=LONG_AGO, ready_since=NOW), waiting=1, wanted_since=NOW), hungry("b")),
        (NOW + 10,),
    ),
    "3.8 an idle one is enough: the busy one stays": (
        (model("a", replica(1, running=1, size=5)), model("c", replica(2, size=5)), hungry("b", need=5)),
        (StopReplica("c", 2, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.10 what loads now is not stopped": ((model("a", replica(1, "loading")), hungry("b")), ()),
    "3.10 nor what comes back after a crash": ((model("a", replica(1, "restarting")), hungry("b")), ()),
}


@pytest.mark.parametrize(("models", "expected"), TABLE.values(), ids=TABLE.keys())
def test_the_decision_tree(models: tuple[ModelView, ...], expected: tuple[Any, ...]):
    assert decided(*models) == expected


def test_a_model_larger_than_the_limit_is_rejected_with_the_numbers():
    (action,) = decided(hungry("a", need=11 * 2**20), limit=10 * 2**20)
    assert isinstance(action, RejectModel)
    assert action.error.code == "model_too_large"
    assert "11 MiB" in action.error.message
    assert "memory_limit" in action.error.message


def test_a_model_that_is_up_is_not_rejected_for_an_extra_replica_that_cannot_be():
    assert decided(hungry("a", replica(1, running=1), need=11, target=2)) == ()


def test_room_that_was_made_for_one_is_not_taken_by_an_older_one():
    """b was decided for; a, which had to go, has the older requests and must not snatch the room back."""
    a, b = hungry("a", since=LONG_AGO), hungry("b", replica(2, "placing"), since=NOW - 20)
    assert decided(a, b) == (StartReplica("b", 2),)


def test_one_that_waits_for_room_does_not_keep_a_small_one_out():
    busy = model("a", replica(1, running=1, ready_since=NOW))
    assert decided(busy, hungry("b"), hungry("c", need=4)) == (StartReplica("c"), NOW + 10)


def test_a_claim_keeps_its_room_from_a_small_one():
    leaving = model("a", replica(1, "draining", running=1, size=8), target=0)
    assert decided(leaving, hungry("b", replica(2, "placing"), need=9), hungry("c", need=2)) == ()


def test_those_who_wait_longest_are_first():
    assert decided(hungry("a", since=5.0), hungry("b", since=3.0)) == (StartReplica("b"),)


def test_a_cancelled_waiter_leaves_no_claim_behind():
    a, b = model("a", replica(1, "draining", running=1), target=0), model("b", replica(2, "placing"), target=0)
    assert decided(a, b) == (StopReplica("b", 2),)


def test_one_that_drained_for_nobody_goes_on_when_it_is_wanted():
    a = hungry("a", replica(1, "draining", running=1, evicting=True))
    assert decided(a) == (KeepReplica("a", 1),)
    assert decided(a, hungry("b", replica(2, "placing"))) == ()


# --- where no limit is set --------------------------------------------------------------------------------------------


def test_without_any_limit_everything_starts():
    assert decided(model("a", IDLE), hungry("b", need=10**9), limit=None) == (StartReplica("b"),)


def test_what_the_machine_has_makes_idle_ones_leave():
    assert decided(model("a", IDLE), hungry("b"), limit=None, soft=10) == (
        StopReplica("a", 1, evict=True),
        ReserveMemory("b", "waiting for memory"),
    )


def test_where_nobody_could_leave_the_engine_says_whether_it_fits():
    assert decided(hungry("b", need=99), limit=None, soft=10) == (StartReplica("b"),)
    assert decided(hungry("b", need=99, since=None), limit=None, soft=10) == (StartReplica("b"),)
    assert decided(model("a", replica(1, size=0)), hungry("b", need=99), limit=None, soft=10) == (StartReplica("b"),)


def test_what_the_machine_has_does_not_make_a_start_drive_others_out():
    assert decided(model("a", IDLE), hungry("b", since=None), limit=None, soft=10) == (
        SleepModel("b", "not enough free memory beside the loaded models"),
    )


def test_the_same_pool_always_gets_the_same_plan():
    for models, _ in TABLE.values():
        assert decided(*models) == decided(*models)


# --- several machines -------------------------------------------------------------------------------------------------


def across(*models: ModelView, nodes: tuple[str, ...] = ("far", ""), **room: dict[str, int]) -> tuple[Any, ...]:
    return plan(PoolView(models=models, nodes=nodes, **room), NOW).actions


def test_a_replica_goes_to_the_first_machine_that_has_room_for_it():
    soft = {"cpu": 10, "cpu@far": 10}
    assert across(hungry("a"), soft=soft) == (StartReplica("a", None, "far"),)
    assert across(hungry("a"), soft=soft | {"cpu@far": 5}) == (StartReplica("a", None, ""),)


def test_what_is_held_on_one_machine_takes_nothing_from_another():
    there = ReplicaView(id=1, state="ready", bytes={"cpu@far": 6}, running=1, ready_since=NOW)
    soft = {"cpu": 10, "cpu@far": 10}
    assert across(model("b", there), hungry("a"), soft=soft) == (StartReplica("a", None, ""),)
    assert across(model("b", there), hungry("a"), soft=soft, nodes=("far",)) == ()


def test_two_that_start_at_once_do_not_count_the_same_room_twice():
    soft = {"cpu": 10, "cpu@far": 10}
    assert across(hungry("a"), hungry("b"), soft=soft) == (StartReplica("a", None, "far"), StartReplica("b", None, ""))


def test_room_is_made_on_the_machine_where_somebody_idles():
    there = ReplicaView(id=1, state="ready", bytes={"cpu@far": 6}, idle_since=LONG_AGO)
    soft = {"cpu": 1, "cpu@far": 6}
    told = across(model("b", there), hungry("a"), soft=soft)
    assert told == (StopReplica("b", 1, True), ReserveMemory("a", "waiting for memory"))


def test_what_it_takes_on_another_machine_may_be_something_else():
    on_gpu = hungry("a", need_by_node={"far": {"gpu": 6}})
    assert across(on_gpu, soft={"cpu@far": 1, "gpu@far": 8, "cpu": 1}) == (StartReplica("a", None, "far"),)


def test_a_model_is_too_large_only_where_no_machine_may_hold_it():
    assert across(hungry("a"), hard={"cpu": 10, "cpu@far": 5}) == (StartReplica("a", None, ""),)
    (refused,) = across(hungry("a"), hard={"cpu": 5, "cpu@far": 5})
    assert isinstance(refused, RejectModel)
    assert "memory_limit" in refused.error.message
    assert "gpu" not in refused.error.message


def test_nobody_judges_what_fits_on_a_machine_that_nobody_knows():
    assert across(hungry("a"), soft={"cpu": 1}, nodes=("?",)) == (StartReplica("a", None, "?"),)
