"""What the optimizer may turn of a model that vLLM runs."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo
from modelyard.core.knobs import Goal
from modelyard.engines.vllm.knobs import current, knobs
from tests.engines.vllm.helpers import spec

HERE = AvailableMemory(1 << 34)


def names(goal: Goal) -> list[str]:
    return [knob.name for knob in knobs(spec(), HERE, goal)]


def test_places_are_a_knob_for_batches_only() -> None:
    assert "parallel" in names("batch")
    assert "parallel" not in names("chat")


def test_requests_at_a_time_are_a_knob_only_where_somebody_has_set_them() -> None:
    """Unset, they are as many as there are places."""
    assert "vllm_max_num_seqs" not in names("batch")
    told = spec({"main": CacheInfo(512, 3), "aside": CacheInfo(512, 2)}, vllm_max_num_seqs=1)
    (knob,) = [knob for knob in knobs(told, HERE, "batch") if knob.name == "vllm_max_num_seqs"]
    assert knob.values == (5,)


@pytest.mark.parametrize(("goal", "fills"), [("chat", False), ("agent", False), ("batch", True), ("memory", True)])
def test_tokens_of_a_step_are_a_knob_where_a_trial_can_show_them(goal: Goal, fills: bool) -> None:
    assert ("vllm_max_num_batched_tokens" in names(goal)) is fills


def test_memory_has_no_number_formats_to_turn() -> None:
    """The cache has as many bytes as it was given, whatever the numbers in it."""
    assert "vllm_kv_cache_dtype" not in names("memory")


def test_the_caches_number_format_is_judged_before_it_is_tried() -> None:
    (format,) = [knob for knob in knobs(spec(), HERE, "chat") if knob.name == "vllm_kv_cache_dtype"]
    assert format.lossy
    assert format.values == ("auto", "fp8")


def test_every_knob_has_a_current_value() -> None:
    held = current(spec({"main": CacheInfo(512, 3)}, vllm_kv_cache_dtype="fp8_e5m2"), "main")
    assert held.keys() >= set(names("batch"))
    assert (held["parallel"], held["vllm_max_num_seqs"]) == (3, 3)
    assert held["vllm_kv_cache_dtype"] == "fp8_e5m2"


def test_a_step_is_what_vllm_takes_by_itself_and_no_more_than_all_windows() -> None:
    def step(window: int, **chosen: Any) -> object:
        return current(spec({"main": CacheInfo(window, 3)}, **chosen), "main")["vllm_max_num_batched_tokens"]

    assert step(4096) == 2048
    assert step(512) == 1536
    assert step(512, vllm_max_num_batched_tokens=4096) == 4096
