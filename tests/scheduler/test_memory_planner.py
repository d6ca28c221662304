"""What fits, and who goes: tables of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate, Node
from modelyard.core.errors import InvalidRequest
from modelyard.core.pool import ModelSpec
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
from modelyard.scheduler.pooled_model import PooledModel
from modelyard.scheduler.replica import Replica
from modelyard.scheduler.settings import SchedulerOptions


@pytest.mark.parametrize(
    ("limits", "gpus", "expected"),
    [
        (MemoryLimits(), {}, {}),
        (MemoryLimits(ram=10), {}, {"cpu": 10}),
        (MemoryLimits(each_gpu=5), {"A": 1, "B": 1}, {"gpu": 10, "gpu:A": 5, "gpu:B": 5}),
        (MemoryLimits(gpus={"A": 5}), {"A": 1, "B": 1}, {"gpu:A": 5}),  # B is free, so all together are
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
        (MemoryEstimate(weights=10), 5, {"cpu": 10}),  # what is not written to yet does not show
        (MemoryEstimate(weights=10), 99, {"cpu": 15}),  # others grew meanwhile
        (MemoryEstimate(), 7, {"cpu": 7}),
        (MemoryEstimate(weights=10, device="gpu"), 7, {"gpu": 7}),
        (MemoryEstimate(weights=10, device="gpu"), 1, {"gpu": 5}),
        (MemoryEstimate(weights=10, device="gpu:A"), 99, {"gpu": 20, "gpu:A": 20}),
        (MemoryEstimate(weights=10, device="gpu"), None, {"gpu": 10}),
        (MemoryEstimate(weights=10, device="cuda"), None, {"gpu": 10}),
        (MemoryEstimate(weights=10, device="gpu:A"), None, {"gpu": 10, "gpu:A": 10}),
        (MemoryEstimate(), None, {}),
    ],
)
def test_what_a_replica_counts_for(memory: MemoryEstimate, measured: int | None, expected: dict[str, int]):
    assert replica_bytes(memory, measured) == expected


def test_devices_without_a_limit_never_fill_up():
    left = free_bytes({"cpu": 10}, [{"cpu": 4}, {"gpu": 99}])
    assert left == {"cpu": 6}
    assert fits({"cpu": 6, "gpu": 10**12}, left)
    assert not fits({"cpu": 7}, left)


def tenant(id: int, size: int, device: str = "cpu", **more: float) -> EvictionCandidate:
    return EvictionCandidate(id=id, bytes={device: size}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("need", "left", "tenants", "expected"),
    [
        (5, 5, [tenant(1, 9)], ()),  # nobody has to go
        (5, 0, [], None),
        (5, 0, [tenant(1, 4)], None),
        (5, 2, [tenant(1, 4)], (1,)),
        (5, 0, [tenant(1, 5, idle_s=10.0), tenant(2, 5, idle_s=100.0)], (2,)),  # the longest unused
        (5, 0, [tenant(1, 5, load_s=60.0), tenant(2, 5, load_s=2.0)], (2,)),  # the quickest to come back
        (
            5,
            0,
            [tenant(1, 5), EvictionCandidate(id=2, bytes={"cpu": 5}, has_siblings=True)],
            (2,),
        ),  # others of its model stay
        (4, 0, [tenant(1, 2), tenant(2, 40)], (2,)),  # one large rather than all
        (9, 0, [tenant(1, 5), tenant(2, 5), tenant(3, 5)], (1, 2)),
        (5, 0, [tenant(1, 50, "gpu"), tenant(2, 5)], (2,)),  # memory that is not short helps nobody
        (6, 0, [tenant(1, 2, idle_s=1e6), tenant(2, 6)], (2,)),  # who proved unnecessary stays
    ],
)
def test_the_cheapest_set_that_makes_room_goes(
    need: int, left: int, tenants: list[EvictionCandidate], expected: tuple[int, ...] | None
):
    assert choose_evictions({"cpu": need}, {"cpu": left}, tenants) == expected


def test_room_may_be_short_on_two_devices_at_once():
    need, left = {"cpu": 4, "gpu": 4}, {"cpu": 0, "gpu": 0}
    tenants = [tenant(1, 4), tenant(2, 4, "gpu"), tenant(3, 4)]
    assert set(choose_evictions(need, left, tenants) or ()) == {1, 2}


# The ledger of what loads really took.


def test_what_was_measured_is_known_to_the_next_run(tmp_path: Path):
    ledger = MeasurementStore(tmp_path / "new" / "measured.json")
    ledger.put("a", LoadMeasurement(5, 1.5))
    ledger.save(ledger.encode())
    again = MeasurementStore(tmp_path / "new" / "measured.json")
    assert again.get("a") == LoadMeasurement(5, 1.5)
    assert again.get("b") is None
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["measured.json"]


def test_a_load_that_nobody_could_measure_keeps_the_bytes_of_the_last():
    ledger = MeasurementStore()
    ledger.put("a", LoadMeasurement(5, 1.0))
    ledger.put("a", LoadMeasurement(None, 2.0))
    assert ledger.get("a") == LoadMeasurement(5, 2.0)


def test_only_the_newest_are_kept():
    ledger = MeasurementStore()
    for number in range(300):
        ledger.put(str(number), LoadMeasurement(number, 0.0))
    assert ledger.get("43") is None
    assert ledger.get("44") == LoadMeasurement(44, 0.0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": {"bytes": "x"}}', b"[]"])
def test_a_file_that_cannot_be_read_is_made_anew(tmp_path: Path, content: bytes):
    path = tmp_path / "measured.json"
    path.write_bytes(content)
    ledger = MeasurementStore(path)
    assert ledger.get("a") is None
    ledger.put("a", LoadMeasurement(1, 1.0))
    ledger.save(ledger.encode())
    assert MeasurementStore(path).get("a") == LoadMeasurement(1, 1.0)


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    ledger = MeasurementStore(tmp_path / "file" / "measured.json")
    ledger.save(b"{}")
    assert "cannot save memory measurements" in caplog.text


# What a replica will take: estimated, measured, remembered.

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
