"""What fills a machine's memory: models by weights and caches, everything else, and what is free."""

from __future__ import annotations

from typing import Any

from modelyard.workbench.bars import bars

GB = 2**30


def model(name: str, device: str = "cpu", ready: int = 1, **caches: tuple[int, int]) -> dict[str, Any]:
    return {
        "id": name,
        "memory": {"estimate": {"weights": GB, "kv": GB, "compute": GB // 2, "device": device}},
        "replicas": {"items": [{"state": "ready"}] * ready},
        "caches": {cache: {"window": window, "parallel": places} for cache, (window, places) in caches.items()},
    }


def machine(*gpus: tuple[int, int]) -> dict[str, Any]:
    cards = [{"name": f"GPU {place}", "total": total, "used": used} for place, (total, used) in enumerate(gpus)]
    return {"ram": {"total": 16 * GB, "free": 10 * GB, "used_here": GB}, "gpus": cards}


def test_the_pieces_and_what_is_free_are_the_whole() -> None:
    (ram,) = bars(machine(), [model("m", main=(100, 1))])
    assert ram.free == 10 * GB
    assert [piece.name for piece in ram.pieces] == ["m weights", "m KV main", "m compute", "everything else"]


def test_each_cache_has_its_share_of_the_kv() -> None:
    (ram,) = bars(machine(), [model("m", main=(100, 3), fast=(100, 1))])
    taken = {piece.name: piece.bytes for piece in ram.pieces}
    assert (taken["m KV main"], taken["m KV fast"]) == (GB * 3 // 4, GB // 4)


def test_replicas_count_and_a_model_that_is_not_up_takes_nothing() -> None:
    (ram,) = bars(machine(), [model("two", ready=2, main=(1, 1)), model("none", ready=0, main=(1, 1))])
    taken = {piece.name: piece.bytes for piece in ram.pieces}
    assert taken["two weights"] == 2 * GB
    assert not any(name.startswith("none") for name in taken)


def test_a_model_on_gpus_is_shared_among_them_by_what_they_hold() -> None:
    ram, first, second = bars(machine((8 * GB, 3 * GB), (8 * GB, GB)), [model("m", "gpu", main=(1, 1))])
    assert [piece.name for piece in ram.pieces] == ["everything else"]
    assert {piece.name: piece.bytes for piece in first.pieces}["m weights"] == GB * 3 // 4
    assert {piece.name: piece.bytes for piece in second.pieces}["m weights"] == GB // 4


def test_an_estimate_above_what_is_in_use_leaves_nothing_for_others() -> None:
    _, gpu = bars(machine((8 * GB, GB)), [model("m", "gpu", main=(1, 1))])
    assert gpu.pieces[-1].bytes == 0
