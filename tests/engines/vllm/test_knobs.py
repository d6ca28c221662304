"""The vLLM options that `modelyard tune` may change."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo
from modelyard.core.knobs import Goal
from modelyard_vllm.knobs import current, knobs
from tests.engines.vllm.helpers import spec

HERE = AvailableMemory(1 << 34)


def names(goal: Goal) -> list[str]:
    return [knob.name for knob in knobs(spec(), HERE, goal)]


def test_parallel_is_a_knob_for_batch_only() -> None:
    assert "parallel" in names("batch")
    assert "parallel" not in names("chat")


def test_max_num_seqs_is_a_knob_only_if_it_is_set() -> None:
    """Unset, it follows `parallel`."""
    assert "vllm_max_num_seqs" not in names("batch")
    configured = spec({"main": CacheInfo(512, 3), "aside": CacheInfo(512, 2)}, vllm_max_num_seqs=1)
    (knob,) = [knob for knob in knobs(configured, HERE, "batch") if knob.name == "vllm_max_num_seqs"]
    assert knob.values == (5,)


@pytest.mark.parametrize(("goal", "fills"), [("chat", False), ("agent", False), ("batch", True), ("memory", True)])
def test_batched_tokens_are_a_knob_only_if_trials_fill_a_step(goal: Goal, fills: bool) -> None:
    assert ("vllm_max_num_batched_tokens" in names(goal)) is fills


def test_memory_goal_has_no_kv_cache_dtype() -> None:
    """The size of the cache is given in bytes, whatever the number format."""
    assert "vllm_kv_cache_dtype" not in names("memory")


def test_kv_cache_dtype_is_lossy() -> None:
    (knob,) = [knob for knob in knobs(spec(), HERE, "chat") if knob.name == "vllm_kv_cache_dtype"]
    assert knob.lossy
    assert knob.values == ("auto", "fp8")


def test_every_knob_has_a_current_value() -> None:
    values = current(spec({"main": CacheInfo(512, 3)}, vllm_kv_cache_dtype="fp8_e5m2"), "main")
    assert values.keys() >= set(names("batch"))
    assert (values["parallel"], values["vllm_max_num_seqs"]) == (3, 3)
    assert values["vllm_kv_cache_dtype"] == "fp8_e5m2"


def test_default_batched_tokens_are_vllms_and_no_more_than_all_windows() -> None:
    def batched_tokens(window: int, **values: Any) -> object:
        return current(spec({"main": CacheInfo(window, 3)}, **values), "main")["vllm_max_num_batched_tokens"]

    assert batched_tokens(4096) == 2048
    assert batched_tokens(512) == 1536
    assert batched_tokens(512, vllm_max_num_batched_tokens=4096) == 4096
