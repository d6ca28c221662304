"""Tables of the policy: a pool, a time, and the actions. Bytes are small numbers; the RAM limit is 10."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct

from modelyard.scheduler.policy import (
    EstimateMemory,
    KeepReplica,
    PoolView,
    RejectModel,
    ReserveMemory,
    SleepModel,
    StartReplica,
    StopReplica,
    plan,
)
from modelyard.scheduler.pooled_model import Replica

NOW = 1000.0
LONG_AGO = 0.0


class ReplicaView(Struct, frozen=True, kw_only=True):
    """What the policy reads of a `Replica`."""

    id: int
    state: Any
    bytes: dict[str, int] = {}
    running: int = 0
    ready_since: float = 0.0
    idle_since: float = 0.0
    evicting: bool = False
    is_stopping = Replica.is_stopping


class ModelView(Struct, frozen=True, kw_only=True):
    """What the policy reads of a `PooledModel`."""

    key: str
    target: int = 0
    wanted_since: float | None = None
    need: dict[str, int] | None = {}
    replicas: tuple[ReplicaView, ...] = ()
    waiting: int = 0
    load_s: float | None = None
    idle_ttl_s: float | None = None
    need_by_node: dict[str, dict[str, int]] = {}


def replica(id: int, state: Any = "ready", size: int = 6, **more: Any) -> ReplicaView:
    return ReplicaView(id=id, state=state, bytes={"cpu": size} if size else {}, **more)


def model(name: str, *replicas: ReplicaView, need: int | None = 6, **more: Any) -> ModelView:
    needs = None if need is None else {"cpu": need} if need else {}
    return ModelView(**{"key": name, "need": needs, "replicas": replicas, "target": len(replicas)} | more)


def wanted(name: str, *replicas: ReplicaView, since: float | None = LONG_AGO, **more: Any) -> ModelView:
    """It should have one replica, and a request waits for it."""
    waiting = 0 if since is None else 1
    return model(name, *replicas, **{"target": 1, "wanted_since": since, "waiting": waiting} | more)


def planned(*models: ModelView, now: float = NOW, limit: int | None = 10, soft: int | None = None) -> tuple[Any, ...]:
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
    "surplus: the idle replica stops": (
        (model("a", replica(1, running=1, size=2), replica(2, size=2), target=1),),
        (StopReplica("a", 2),),
    ),
    "surplus: a loading replica stops before a ready one": (
        (model("a", replica(1, size=2), replica(2, "loading", size=2), target=1),),
        (StopReplica("a", 2),),
    ),
    "surplus: a reservation stops first": (
        (model("a", replica(1, size=2), replica(2, "reserved", size=2), target=1),),
        (StopReplica("a", 2),),
    ),
    "target 0: all stop": ((model("a", replica(1, running=3), target=0),), (StopReplica("a", 1),)),
    "stopping replicas are not stopped again": (
        (model("a", replica(1, "draining", running=1), replica(2, "closing"), target=0),),
        (),
    ),
    # 2. idle
    "idle for its TTL: sleep": (
        (model("a", replica(1, idle_since=NOW - 60), idle_ttl_s=60.0),),
        (SleepModel("a", "no requests for 60 s"),),
    ),
    "idle for less than its TTL: plan again later": (
        (model("a", replica(1, idle_since=NOW - 50), idle_ttl_s=60.0),),
        (NOW + 10,),
    ),
    "a running replica is not idle": ((model("a", replica(1, running=1), idle_ttl_s=60.0),), ()),
    "not idle if another replica runs": (
        (model("a", replica(1, size=2), replica(2, size=2, running=1), idle_ttl_s=60.0),),
        (),
    ),
    "not idle if an administrator waits for it": ((model("a", IDLE, idle_ttl_s=60.0, wanted_since=NOW),), ()),
    # 3. missing
    "3.2 unknown need": ((wanted("a", need=None),), (EstimateMemory("a"),)),
    "3.4 it fits": ((wanted("a"),), (StartReplica("a"),)),
    "3.4 it needs no memory": ((wanted("a", need=0), model("b", replica(1, size=10))), (StartReplica("a"),)),
    "3.4 both replicas fit": ((wanted("a", need=5, target=2),), (StartReplica("a"), StartReplica("a"))),
    "3.4 only one of two replicas fits": ((wanted("a", need=6, target=2, since=None),), (StartReplica("a"),)),
    "3.5 without waiters it evicts nothing": (
        (model("a", IDLE), wanted("b", since=None)),
        (SleepModel("b", "not enough free memory beside the loaded models"),),
    ),
    "3.6 a stopping replica frees enough memory": (
        (model("a", replica(1, "closing"), target=0), wanted("b")),
        (ReserveMemory("b", "waiting for memory"),),
    ),
    "3.6 a reservation keeps waiting": (
        (model("a", replica(1, "closing"), target=0), wanted("b", replica(2, "reserved"))),
        (),
    ),
    "3.7 an idle replica is evicted": (
        (model("a", IDLE), wanted("b")),
        (StopReplica("a", 1, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.7 the longest idle replica is evicted": (
        (
            model("a", replica(1, idle_since=90, size=5)),
            model("c", replica(2, idle_since=80, size=5)),
            wanted("b", need=5),
        ),
        (StopReplica("c", 2, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.7 a replica that has just become idle lingers": (
        (model("a", replica(1, idle_since=NOW - 0.25, ready_since=NOW)), wanted("b", since=NOW)),
        (NOW + 0.75,),
    ),
    "3.8 a busy replica stays during its turn": (
        (model("a", replica(1, running=1, ready_since=NOW - 3)), wanted("b")),
        (NOW + 7,),
    ),
    "3.8 patience counts from the arrival of the request": (
        (model("a", BUSY), wanted("b", since=NOW - 4)),
        (NOW + 6,),
    ),
    "3.8 its turn is over": (
        (model("a", BUSY), wanted("b", since=NOW - 10)),
        (StopReplica("a", 1, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.8 a replica with waiting requests is busy": (
        (model("a", replica(1, idle_since=LONG_AGO, ready_since=NOW), waiting=1, wanted_since=NOW), wanted("b")),
        (NOW + 10,),
    ),
    "3.8 an idle replica is evicted before a busy one": (
        (model("a", replica(1, running=1, size=5)), model("c", replica(2, size=5)), wanted("b", need=5)),
        (StopReplica("c", 2, evict=True), ReserveMemory("b", "waiting for memory")),
    ),
    "3.10 a loading replica is not evicted": ((model("a", replica(1, "loading")), wanted("b")), ()),
    "3.10 a restarting replica is not evicted": ((model("a", replica(1, "restarting")), wanted("b")), ()),
}


@pytest.mark.parametrize(("models", "expected"), TABLE.values(), ids=TABLE.keys())
def test_the_decision_tree(models: tuple[ModelView, ...], expected: tuple[Any, ...]):
    assert planned(*models) == expected


def test_a_model_larger_than_the_limit_is_rejected_with_the_numbers():
    (action,) = planned(wanted("a", need=11 * 2**20), limit=10 * 2**20)
    assert isinstance(action, RejectModel)
    assert action.error.code == "model_too_large"
    assert "11 MiB" in action.error.message
    assert "memory_limit" in action.error.message


def test_a_ready_model_is_not_rejected_for_an_extra_replica_that_does_not_fit():
    assert planned(wanted("a", replica(1, running=1), need=11, target=2)) == ()


def test_memory_freed_for_a_reservation_is_not_taken_by_an_older_waiter():
    """a was evicted for b. It has the older requests and must not take the memory back."""
    a, b = wanted("a", since=LONG_AGO), wanted("b", replica(2, "reserved"), since=NOW - 20)
    assert planned(a, b) == (StartReplica("b", 2),)


def test_a_model_waiting_for_memory_does_not_block_a_small_one():
    busy = model("a", replica(1, running=1, ready_since=NOW))
    assert planned(busy, wanted("b"), wanted("c", need=4)) == (StartReplica("c"), NOW + 10)


def test_a_reservation_keeps_its_memory_from_a_small_model():
    leaving = model("a", replica(1, "draining", running=1, size=8), target=0)
    assert planned(leaving, wanted("b", replica(2, "reserved"), need=9), wanted("c", need=2)) == ()


def test_the_longest_waiting_model_is_first():
    assert planned(wanted("a", since=5.0), wanted("b", since=3.0)) == (StartReplica("b"),)


def test_a_cancelled_waiter_leaves_no_reservation():
    a, b = model("a", replica(1, "draining", running=1), target=0), model("b", replica(2, "reserved"), target=0)
    assert planned(a, b) == (StopReplica("b", 2),)


def test_an_eviction_without_a_reservation_is_undone():
    a = wanted("a", replica(1, "draining", running=1, evicting=True))
    assert planned(a) == (KeepReplica("a", 1),)
    assert planned(a, wanted("b", replica(2, "reserved"))) == ()


# --- without a limit -----------------------------------------------------------------------------------------------


def test_everything_starts_without_a_limit():
    assert planned(model("a", IDLE), wanted("b", need=10**9), limit=None) == (StartReplica("b"),)


def test_the_memory_of_the_machine_evicts_idle_models():
    assert planned(model("a", IDLE), wanted("b"), limit=None, soft=10) == (
        StopReplica("a", 1, evict=True),
        ReserveMemory("b", "waiting for memory"),
    )


def test_a_model_starts_beyond_the_soft_limit_if_nothing_can_be_evicted():
    assert planned(wanted("b", need=99), limit=None, soft=10) == (StartReplica("b"),)
    assert planned(wanted("b", need=99, since=None), limit=None, soft=10) == (StartReplica("b"),)
    assert planned(model("a", replica(1, size=0)), wanted("b", need=99), limit=None, soft=10) == (StartReplica("b"),)


def test_a_model_without_waiters_evicts_nothing():
    assert planned(model("a", IDLE), wanted("b", since=None), limit=None, soft=10) == (
        SleepModel("b", "not enough free memory beside the loaded models"),
    )


def test_the_plan_is_deterministic():
    for models, _ in TABLE.values():
        assert planned(*models) == planned(*models)


# --- several nodes ----------------------------------------------------------------------------------------------------


def plan_nodes(*models: ModelView, nodes: tuple[str, ...] = ("far", ""), **room: dict[str, int]) -> tuple[Any, ...]:
    return plan(PoolView(models=models, nodes=nodes, **room), NOW).actions


def test_a_replica_goes_to_the_first_node_with_enough_memory():
    soft = {"cpu": 10, "cpu@far": 10}
    assert plan_nodes(wanted("a"), soft=soft) == (StartReplica("a", None, "far"),)
    assert plan_nodes(wanted("a"), soft=soft | {"cpu@far": 5}) == (StartReplica("a", None, ""),)


def test_memory_is_counted_per_node():
    remote = ReplicaView(id=1, state="ready", bytes={"cpu@far": 6}, running=1, ready_since=NOW)
    soft = {"cpu": 10, "cpu@far": 10}
    assert plan_nodes(model("b", remote), wanted("a"), soft=soft) == (StartReplica("a", None, ""),)
    assert plan_nodes(model("b", remote), wanted("a"), soft=soft, nodes=("far",)) == ()


def test_two_starts_do_not_use_the_same_memory():
    soft = {"cpu": 10, "cpu@far": 10}
    assert plan_nodes(wanted("a"), wanted("b"), soft=soft) == (
        StartReplica("a", None, "far"),
        StartReplica("b", None, ""),
    )


def test_an_idle_replica_is_evicted_on_its_node():
    remote = ReplicaView(id=1, state="ready", bytes={"cpu@far": 6}, idle_since=LONG_AGO)
    soft = {"cpu": 1, "cpu@far": 6}
    actions = plan_nodes(model("b", remote), wanted("a"), soft=soft)
    assert actions == (StopReplica("b", 1, True), ReserveMemory("a", "waiting for memory"))


def test_a_node_may_have_its_own_estimate():
    on_gpu = wanted("a", need_by_node={"far": {"gpu": 6}})
    assert plan_nodes(on_gpu, soft={"cpu@far": 1, "gpu@far": 8, "cpu": 1}) == (StartReplica("a", None, "far"),)


def test_a_model_is_rejected_only_if_it_fits_no_node():
    assert plan_nodes(wanted("a"), hard={"cpu": 10, "cpu@far": 5}) == (StartReplica("a", None, ""),)
    (refused,) = plan_nodes(wanted("a"), hard={"cpu": 5, "cpu@far": 5})
    assert isinstance(refused, RejectModel)
    assert "memory_limit" in refused.error.message
    assert "gpu" not in refused.error.message


def test_an_unknown_node_always_fits():
    assert plan_nodes(wanted("a"), soft={"cpu": 1}, nodes=("?",)) == (StartReplica("a", None, "?"),)
