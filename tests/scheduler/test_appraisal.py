"""What a replica will take: estimated, measured, remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate, Node
from modelyard.core.errors import InvalidRequest
from modelyard.core.pool import ModelSpec
from modelyard.scheduler.memory_planner import LoadMeasurement, MeasurementStore, MemoryLimits, MemoryPlanner
from modelyard.scheduler.pooled_model import PooledModel
from modelyard.scheduler.replica import Replica
from modelyard.scheduler.settings import SchedulerOptions

GIB = 2**30


def pooled(estimate: Callable[[AvailableMemory], MemoryEstimate] | None) -> PooledModel:
    make: Any = None
    blueprint = ModelSpec(name="m", caches={"main": CacheInfo(10)}, make=make, estimate=estimate, identity="m:1")
    return PooledModel("m", blueprint, SchedulerOptions())


def replica(model: PooledModel, took: dict[str, int] | None) -> Replica:
    reports: Any = None
    one = Replica(1, "m", model.active_spec, reports, load_timeout_s=1.0)
    one.load_growth = took
    return one


async def surveyed(appraiser: MemoryPlanner, memory: MemoryEstimate, *held: dict[str, int]) -> PooledModel:
    model = pooled(lambda _: memory)
    await appraiser.estimate(model, lambda: held)
    return model


async def test_what_is_estimated_holds_where_nothing_was_measured():
    model = await surveyed(MemoryPlanner(), MemoryEstimate(weights=5, kv=2))
    assert (model.need, model.measured, model.estimate) == ({"cpu": 7}, None, MemoryEstimate(weights=5, kv=2))


async def test_what_was_measured_at_the_last_load_corrects_the_estimate():
    ledger = MeasurementStore()
    ledger.put("m:1", LoadMeasurement(9, 3.0))
    model = await surveyed(MemoryPlanner(measurements=ledger), MemoryEstimate(weights=5, kv=2))
    assert (model.need, model.measured, model.load_s) == ({"cpu": 9}, 9, 3.0)


@pytest.mark.parametrize(("limit", "need"), [(20, 15), (12, 12), (10, 10), (8, 10)])
async def test_what_was_measured_makes_no_model_too_large_that_is_not(limit: int, need: int):
    ledger = MeasurementStore()
    ledger.put("m:1", LoadMeasurement(99, 3.0))
    model = await surveyed(MemoryPlanner(MemoryLimits(ram=limit), measurements=ledger), MemoryEstimate(weights=10))
    assert model.need == {"cpu": need}


async def test_an_estimate_that_cannot_be_made_is_left_to_the_load():
    def estimate(_: AvailableMemory) -> MemoryEstimate:
        raise InvalidRequest("no such file")

    model = pooled(estimate)
    await MemoryPlanner().estimate(model, tuple)
    assert (model.need, model.estimate) == ({}, None)


async def test_limits_are_those_that_were_set_for_the_devices_that_are_there():
    appraiser = MemoryPlanner(MemoryLimits(ram=5, each_gpu=7), available=lambda: AvailableMemory(100, {"X": 50}))
    assert appraiser.hard == {"cpu": 5}
    await surveyed(appraiser, MemoryEstimate(weights=1), {"cpu": 3, "gpu": 2})
    assert appraiser.hard == {"cpu": 5, "gpu": 7, "gpu:X": 7}
    assert appraiser.soft == {"cpu": 103, "gpu": 52, "gpu:X": 50}


async def loaded(
    took: dict[str, int] | None, memory: MemoryEstimate, *, others: int = 0, quiet: bool = True
) -> tuple[bool, PooledModel, MeasurementStore]:
    ledger = MeasurementStore()
    appraiser = MemoryPlanner(meter=dict, measurements=ledger)
    model = await surveyed(appraiser, memory)
    one = replica(model, took)
    one.allocation = appraiser.count_allocation()
    for _ in range(others):
        appraiser.count_allocation()
    return appraiser.record_load(model, one, 2.5, quiet=quiet), model, ledger


async def test_a_load_is_measured_on_the_device_that_it_went_to():
    new, model, ledger = await loaded({"cpu": GIB, "gpu": 9 * GIB}, MemoryEstimate(weights=2 * GIB))
    assert (new, model.measured, ledger.get("m:1")) == (True, GIB, LoadMeasurement(GIB, 2.5))
    _, model, _ = await loaded({"cpu": GIB, "gpu": 9 * GIB}, MemoryEstimate(weights=2 * GIB, device="gpu"))
    assert model.measured == 9 * GIB


@pytest.mark.parametrize("noise", [{"others": 1}, {"quiet": False}])
async def test_what_grew_while_others_loaded_or_answered_is_nobodys(noise: dict[str, Any]):
    new, model, ledger = await loaded({"cpu": GIB}, MemoryEstimate(weights=2 * GIB), **noise)
    assert (new, model.measured, ledger.get("m:1")) == (True, None, LoadMeasurement(None, 2.5))


async def test_small_changes_are_noise():
    _, model, _ = await loaded({"cpu": 1000}, MemoryEstimate(weights=2 * GIB))
    assert model.measured is None


async def test_where_nothing_was_read_nothing_is_written_down():
    new, model, ledger = await loaded(None, MemoryEstimate(weights=2 * GIB))
    assert (new, model.load_s, ledger.get("m:1")) == (False, 2.5, None)


async def test_models_too_small_to_be_seen_are_not_measured():
    appraiser = MemoryPlanner(meter=dict)
    assert appraiser.meter_for(await surveyed(appraiser, MemoryEstimate(weights=1000))) is None
    assert appraiser.meter_for(await surveyed(appraiser, MemoryEstimate(weights=GIB))) is dict


# --- other machines ---------------------------------------------------------------------------------------------------


async def test_other_machines_are_judged_by_what_they_have_told():
    far = Node("far", AvailableMemory(100, {"u": 40}))
    appraiser = MemoryPlanner(MemoryLimits(ram=50), available=lambda: AvailableMemory(7), nodes=lambda: (far, Node()))
    model = pooled(lambda there: MemoryEstimate(weights=5, device="gpu:u" if there.gpus else ""))
    await appraiser.estimate(model, lambda: ())
    room = appraiser.budget(lambda: ({"cpu@far": 3}, {"cpu": 2}))
    assert room.soft == {"cpu": 7, "cpu@far": 103, "gpu@far": 40, "gpu:u@far": 40}
    assert room.hard == {"cpu": 50, "cpu@far": 50}
    assert room.nodes == ("far", "")
    assert (model.need, model.need_on("far")) == ({"cpu": 5}, {"gpu@far": 5, "gpu:u@far": 5})


async def test_a_machine_counts_as_it_was_when_it_was_first_looked_at_until_the_next_survey():
    free = [100]
    appraiser = MemoryPlanner(nodes=lambda: (Node("far", AvailableMemory(free[0])),))
    assert appraiser.budget(lambda: ()).soft == {"cpu@far": 100}
    free[0] = 90  # a model of ours has been loaded there: it is counted as held
    assert appraiser.budget(lambda: ({"cpu@far": 10},)).soft == {"cpu@far": 100}
    await appraiser.estimate(pooled(lambda _: MemoryEstimate(weights=1)), lambda: ())
    assert appraiser.budget(lambda: ({"cpu@far": 10},)).soft == {"cpu@far": 100}


async def test_what_grew_here_is_not_what_a_replica_took_on_another_machine():
    ledger = MeasurementStore()
    appraiser = MemoryPlanner(meter=dict, measurements=ledger)
    model = await surveyed(appraiser, MemoryEstimate(weights=GIB))
    one = replica(model, {"cpu": GIB})
    one.node, one.bytes = "far", {"cpu@far": GIB}
    assert not appraiser.record_load(model, one, 2.0, quiet=True)
    assert (model.load_s, model.measured, one.bytes, ledger.get("m:1")) == (2.0, None, {"cpu@far": GIB}, None)
