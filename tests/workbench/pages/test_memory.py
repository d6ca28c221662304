"""The memory bars: models by weights and caches, everything else, and what is free."""

from __future__ import annotations

from typing import Any

from modelyard.workbench.pages.memory import MemoryBar, memory_bars

GB = 2**30


def model(name: str, device: str = "cpu", ready: int = 1, **caches: tuple[int, int]) -> dict[str, Any]:
    return {
        "id": name,
        "memory": {"estimate": {"weights": GB, "kv": GB, "compute": GB // 2, "device": device}},
        "replicas": {"items": [{"state": "ready"}] * ready},
        "caches": {cache: {"window": window, "parallel": slots} for cache, (window, slots) in caches.items()},
    }


def machine(*gpus: tuple[int, int]) -> dict[str, Any]:
    cards = [{"name": f"GPU {index}", "total": total, "used": used} for index, (total, used) in enumerate(gpus)]
    return {"ram": {"total": 16 * GB, "free": 10 * GB, "used_here": GB}, "gpus": cards}


def sizes(bar: MemoryBar) -> dict[str, int]:
    return {segment.name: segment.bytes for segment in bar.segments}


def test_segments_and_free_memory_add_up_to_the_total() -> None:
    (ram,) = memory_bars(machine(), [model("m", main=(100, 1))])
    assert ram.free == 10 * GB
    assert list(sizes(ram)) == ["m weights", "m KV main", "m compute", "everything else"]


def test_each_cache_has_its_share_of_the_kv_memory() -> None:
    (ram,) = memory_bars(machine(), [model("m", main=(100, 3), fast=(100, 1))])
    assert (sizes(ram)["m KV main"], sizes(ram)["m KV fast"]) == (GB * 3 // 4, GB // 4)


def test_every_replica_counts_and_a_stopped_model_takes_nothing() -> None:
    (ram,) = memory_bars(machine(), [model("two", ready=2, main=(1, 1)), model("none", ready=0, main=(1, 1))])
    assert sizes(ram)["two weights"] == 2 * GB
    assert not any(name.startswith("none") for name in sizes(ram))


def test_a_model_on_several_gpus_is_divided_in_proportion_to_their_use() -> None:
    ram, first, second = memory_bars(machine((8 * GB, 3 * GB), (8 * GB, GB)), [model("m", "gpu", main=(1, 1))])
    assert list(sizes(ram)) == ["everything else"]
    assert sizes(first)["m weights"] == GB * 3 // 4
    assert sizes(second)["m weights"] == GB // 4


def test_an_estimate_above_the_use_leaves_nothing_for_everything_else() -> None:
    _, gpu = memory_bars(machine((8 * GB, GB)), [model("m", "gpu", main=(1, 1))])
    assert gpu.segments[-1].bytes == 0
