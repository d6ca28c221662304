"""Memory limits, evictions, measurements and the planner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate, Node
from modelyard.core.errors import InvalidRequest
from modelyard.scheduler.memory_planner import (
    EvictionCandidate,
    LoadMeasurement,
    MeasurementStore,
    MemoryLimits,
    MemoryPlanner,
    choose_evictions,
    fits,
    free_bytes,
    replica_bytes,
)
from modelyard.scheduler.pooled_model import PooledModel, Replica
from modelyard.scheduler.settings import SchedulerOptions


@pytest.mark.parametrize(
    ("limits", "gpus", "expected"),
    [
        (MemoryLimits(), {}, {}),
        (MemoryLimits(ram=10), {}, {"cpu": 10}),
        (MemoryLimits(each_gpu=5), {"A": 1, "B": 1}, {"gpu": 10, "gpu:A": 5, "gpu:B": 5}),
        (MemoryLimits(gpus={"A": 5}), {"A": 1, "B": 1}, {"gpu:A": 5}),  # B is unlimited, so is the sum
        (MemoryLimits(gpus={"A": 5, "B": 7}), {"A": 1, "B": 1}, {"gpu": 12, "gpu:A": 5, "gpu:B": 7}),
        (MemoryLimits(ram=3, each_gpu=5), {}, {"cpu": 3}),
    ],
)
def test_limits_are_bytes_by_device(limits: MemoryLimits, gpus: dict[str, int], expected: dict[str, int]):
    assert limits.by_device(AvailableMemory(0, gpus)) == expected


@pytest.mark.parametrize(
    ("memory", "measured", "expected"),
    [
        (MemoryEstimate(weights=6, kv=3, compute=1), None, {"cpu": 10}),
        (MemoryEstimate(weights=10), 12, {"cpu": 12}),
        (MemoryEstimate(weights=10), 5, {"cpu": 10}),  # untouched pages are not resident yet
        (MemoryEstimate(weights=10), 99, {"cpu": 15}),  # others grew too
        (MemoryEstimate(), 7, {"cpu": 7}),
        (MemoryEstimate(weights=10, device="gpu"), 7, {"gpu": 7}),
        (MemoryEstimate(weights=10, device="gpu"), 1, {"gpu": 5}),
        (MemoryEstimate(weights=10, device="gpu:A"), 99, {"gpu": 20, "gpu:A": 20}),
        (MemoryEstimate(weights=10, device="gpu"), None, {"gpu": 10}),
        (MemoryEstimate(weights=10, device="cuda"), None, {"gpu": 10}),
        (MemoryEstimate(weights=10, device="gpu:A"), None, {"gpu": 10, "gpu:A": 10}),
        (MemoryEstimate(), None, {}),
        (MemoryEstimate(weights=10, page_cache=6), 18, {"cpu": 12}),  # clean pages do not count
    ],
)
def test_a_measurement_corrects_an_estimate_within_limits(
    memory: MemoryEstimate, measured: int | None, expected: dict[str, int]
):
    assert replica_bytes(memory, measured) == expected


def test_devices_without_a_limit_always_fit():
    free = free_bytes({"cpu": 10}, [{"cpu": 4}, {"gpu": 99}])
    assert free == {"cpu": 6}
    assert fits({"cpu": 6, "gpu": 10**12}, free)
    assert not fits({"cpu": 7}, free)


def candidate(id: int, size: int, device: str = "cpu", **more: float) -> EvictionCandidate:
    return EvictionCandidate(id=id, bytes={device: size}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("need", "free", "candidates", "expected"),
    [
        (5, 5, [candidate(1, 9)], ()),  # it fits
        (5, 0, [], None),
        (5, 0, [candidate(1, 4)], None),
        (5, 2, [candidate(1, 4)], (1,)),
        (5, 0, [candidate(1, 5, idle_s=10.0), candidate(2, 5, idle_s=100.0)], (2,)),  # the longest idle
        (5, 0, [candidate(1, 5, load_s=60.0), candidate(2, 5, load_s=2.0)], (2,)),  # the quickest to load
        (
            5,
            0,
            [candidate(1, 5), EvictionCandidate(id=2, bytes={"cpu": 5}, has_siblings=True)],
            (2,),
        ),  # its model has other replicas
        (4, 0, [candidate(1, 2), candidate(2, 40)], (2,)),  # one large replica instead of both
        (9, 0, [candidate(1, 5), candidate(2, 5), candidate(3, 5)], (1, 2)),
        (5, 0, [candidate(1, 50, "gpu"), candidate(2, 5)], (2,)),  # only the scarce device counts
        (6, 0, [candidate(1, 2, idle_s=1e6), candidate(2, 6)], (2,)),  # unnecessary evictions are dropped
    ],
)
def test_the_cheapest_sufficient_set_is_evicted(
    need: int, free: int, candidates: list[EvictionCandidate], expected: tuple[int, ...] | None
):
    assert choose_evictions({"cpu": need}, {"cpu": free}, candidates) == expected


def test_evictions_cover_two_devices():
    need, free = {"cpu": 4, "gpu": 4}, {"cpu": 0, "gpu": 0}
    candidates = [candidate(1, 4), candidate(2, 4, "gpu"), candidate(3, 4)]
    assert set(choose_evictions(need, free, candidates) or ()) == {1, 2}


# --- measurements -----------------------------------------------------------------------------------------------------


def test_measurements_persist(tmp_path: Path):
    store = MeasurementStore(tmp_path / "new" / "measured.json")
    store.put("a", LoadMeasurement(5, 1.5))
    store.save(store.encode())
    again = MeasurementStore(tmp_path / "new" / "measured.json")
    assert again.get("a") == LoadMeasurement(5, 1.5)
    assert again.get("b") is None
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["measured.json"]


def test_a_measurement_without_bytes_keeps_the_previous_bytes():
    store = MeasurementStore()
    store.put("a", LoadMeasurement(5, 1.0))
    store.put("a", LoadMeasurement(None, 2.0))
    assert store.get("a") == LoadMeasurement(5, 2.0)


def test_only_the_newest_measurements_are_kept():
    store = MeasurementStore()
    for number in range(300):
        store.put(str(number), LoadMeasurement(number, 0.0))
    assert store.get("43") is None
    assert store.get("44") == LoadMeasurement(44, 0.0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": {"bytes": "x"}}', b"[]"])
def test_an_unreadable_measurement_file_is_replaced(tmp_path: Path, content: bytes):
    path = tmp_path / "measured.json"
    path.write_bytes(content)
    store = MeasurementStore(path)
    assert store.get("a") is None
    store.put("a", LoadMeasurement(1, 1.0))
    store.save(store.encode())
    assert MeasurementStore(path).get("a") == LoadMeasurement(1, 1.0)


def test_a_write_error_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    store = MeasurementStore(tmp_path / "file" / "measured.json")
    store.save(b"{}")
    assert "cannot save memory measurements" in caplog.text


# --- the planner ------------------------------------------------------------------------------------------------------

GIB = 2**30


def pooled_model(planner: MemoryPlanner, estimate: Callable[[AvailableMemory], MemoryEstimate]) -> PooledModel:
    planner._estimate = lambda _, available: estimate(available)
    return PooledModel("m", EngineSpec("m", None, {"main": CacheInfo(10)}, identity="m:1"), SchedulerOptions())


def replica(model: PooledModel, growth: dict[str, int] | None) -> Replica:
    observer: Any = None
    replica_ = Replica(1, "m", model.active_spec, observer, load_timeout_s=1.0)
    replica_.load_growth = growth
    return replica_


async def estimated(planner: MemoryPlanner, memory: MemoryEstimate, *held: dict[str, int]) -> PooledModel:
    model = pooled_model(planner, lambda _: memory)
    await planner.estimate(model, lambda: held)
    return model


async def test_the_estimate_is_the_need_without_a_measurement():
    model = await estimated(MemoryPlanner(), MemoryEstimate(weights=5, kv=2))
    assert (model.need, model.measured, model.estimate) == ({"cpu": 7}, None, MemoryEstimate(weights=5, kv=2))


async def test_the_last_measurement_corrects_the_estimate():
    store = MeasurementStore()
    store.put("m:1", LoadMeasurement(9, 3.0))
    model = await estimated(MemoryPlanner(measurements=store), MemoryEstimate(weights=5, kv=2))
    assert (model.need, model.measured, model.load_s) == ({"cpu": 9}, 9, 3.0)


@pytest.mark.parametrize(("limit", "need"), [(20, 15), (12, 12), (10, 10), (8, 10)])
async def test_a_measurement_never_exceeds_a_limit_that_the_estimate_fits(limit: int, need: int):
    store = MeasurementStore()
    store.put("m:1", LoadMeasurement(99, 3.0))
    model = await estimated(MemoryPlanner(MemoryLimits(ram=limit), measurements=store), MemoryEstimate(weights=10))
    assert model.need == {"cpu": need}


async def test_a_failing_estimate_counts_as_no_need():
    def estimate(_: AvailableMemory) -> MemoryEstimate:
        raise InvalidRequest("no such file")

    planner = MemoryPlanner()
    model = pooled_model(planner, estimate)
    await planner.estimate(model, tuple)
    assert (model.need, model.estimate) == ({}, None)


async def test_limits_apply_to_the_devices_of_the_machine():
    planner = MemoryPlanner(MemoryLimits(ram=5, each_gpu=7), available=lambda: AvailableMemory(100, {"X": 50}))
    assert planner.hard == {"cpu": 5}
    await estimated(planner, MemoryEstimate(weights=1), {"cpu": 3, "gpu": 2})
    assert planner.hard == {"cpu": 5, "gpu": 7, "gpu:X": 7}
    assert planner.soft == {"cpu": 103, "gpu": 52, "gpu:X": 50}


async def record_load(
    growth: dict[str, int] | None, memory: MemoryEstimate, *, others: int = 0, quiet: bool = True
) -> tuple[bool, PooledModel, MeasurementStore]:
    store = MeasurementStore()
    planner = MemoryPlanner(meter=dict, measurements=store)
    model = await estimated(planner, memory)
    replica_ = replica(model, growth)
    replica_.allocation = planner.count_allocation()
    for _ in range(others):
        planner.count_allocation()
    return planner.record_load(model, replica_, 2.5, quiet=quiet), model, store


async def test_a_load_is_measured_on_its_device():
    new, model, store = await record_load({"cpu": GIB, "gpu": 9 * GIB}, MemoryEstimate(weights=2 * GIB))
    assert (new, model.measured, store.get("m:1")) == (True, GIB, LoadMeasurement(GIB, 2.5))
    _, model, _ = await record_load({"cpu": GIB, "gpu": 9 * GIB}, MemoryEstimate(weights=2 * GIB, device="gpu"))
    assert model.measured == 9 * GIB


@pytest.mark.parametrize("disturbance", [{"others": 1}, {"quiet": False}])
async def test_growth_during_other_loads_or_requests_is_not_a_measurement(disturbance: dict[str, Any]):
    new, model, store = await record_load({"cpu": GIB}, MemoryEstimate(weights=2 * GIB), **disturbance)
    assert (new, model.measured, store.get("m:1")) == (True, None, LoadMeasurement(None, 2.5))


async def test_small_growth_is_not_a_measurement():
    _, model, _ = await record_load({"cpu": 1000}, MemoryEstimate(weights=2 * GIB))
    assert model.measured is None


async def test_a_load_without_readings_is_not_recorded():
    new, model, store = await record_load(None, MemoryEstimate(weights=2 * GIB))
    assert (new, model.load_s, store.get("m:1")) == (False, 2.5, None)


async def test_small_models_are_not_measured():
    planner = MemoryPlanner(meter=dict)
    assert planner.meter_for(await estimated(planner, MemoryEstimate(weights=1000))) is None
    assert planner.meter_for(await estimated(planner, MemoryEstimate(weights=GIB))) is dict


# --- other nodes ------------------------------------------------------------------------------------------------------


async def test_other_nodes_count_with_their_reported_memory():
    far = Node("far", AvailableMemory(100, {"u": 40}))
    planner = MemoryPlanner(MemoryLimits(ram=50), available=lambda: AvailableMemory(7), nodes=lambda: (far, Node()))
    model = pooled_model(planner, lambda there: MemoryEstimate(weights=5, device="gpu:u" if there.gpus else ""))
    await planner.estimate(model, lambda: ())
    budget = planner.budget(lambda: ({"cpu@far": 3}, {"cpu": 2}))
    assert budget.soft == {"cpu": 7, "cpu@far": 103, "gpu@far": 40, "gpu:u@far": 40}
    assert budget.hard == {"cpu": 50, "cpu@far": 50}
    assert budget.nodes == ("far", "")
    assert (model.need, model.need_on("far")) == ({"cpu": 5}, {"gpu@far": 5, "gpu:u@far": 5})


async def test_the_memory_of_a_node_is_fixed_until_the_next_estimate():
    free = [100]
    planner = MemoryPlanner(nodes=lambda: (Node("far", AvailableMemory(free[0])),))
    assert planner.budget(lambda: ()).soft == {"cpu@far": 100}
    free[0] = 90  # a model was loaded there: it is counted as held
    assert planner.budget(lambda: ({"cpu@far": 10},)).soft == {"cpu@far": 100}
    await planner.estimate(pooled_model(planner, lambda _: MemoryEstimate(weights=1)), lambda: ())
    assert planner.budget(lambda: ({"cpu@far": 10},)).soft == {"cpu@far": 100}


async def test_local_growth_is_not_a_measurement_of_a_remote_replica():
    store = MeasurementStore()
    planner = MemoryPlanner(meter=dict, measurements=store)
    model = await estimated(planner, MemoryEstimate(weights=GIB))
    replica_ = replica(model, {"cpu": GIB})
    replica_.node, replica_.bytes = "far", {"cpu@far": GIB}
    assert not planner.record_load(model, replica_, 2.0, quiet=True)
    assert (model.load_s, model.measured, replica_.bytes, store.get("m:1")) == (2.0, None, {"cpu@far": GIB}, None)
