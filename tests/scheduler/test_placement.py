"""What fits, and who goes: tables of bytes."""

from __future__ import annotations

import pytest

from modelyard.core.engine import AvailableMemory, MemoryEstimate
from modelyard.scheduler.memory_planner import (
    EvictionCandidate,
    MemoryLimits,
    choose_evictions,
    fits,
    free_bytes,
    replica_bytes,
)


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
