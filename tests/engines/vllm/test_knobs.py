"""What the optimizer may turn of a model that vLLM runs."""

from __future__ import annotations

from modelyard.core.engine import CacheInfo, Machine
from modelyard.core.knobs import Goal
from modelyard.engines.vllm.knobs import current, forbids, knobs
from modelyard.engines.vllm_serve import knobs as served
from tests.engines.vllm.stage import spec

HERE = Machine(1 << 34)


def names(goal: Goal) -> list[str]:
    return [knob.name for knob in knobs(spec(), HERE, goal)]


def test_places_are_a_knob_for_batches_only() -> None:
    assert "vllm_max_num_seqs" in names("batch")
    assert "vllm_max_num_seqs" not in names("chat")


def test_the_caches_number_format_is_judged_before_it_is_tried() -> None:
    (format,) = [knob for knob in knobs(spec(), HERE, "chat") if knob.name == "vllm_kv_cache_dtype"]
    assert format.lossy
    assert format.values == ("auto", "fp8")


def test_every_knob_has_a_current_value() -> None:
    held = current(spec({"main": CacheInfo(512, 3)}, vllm_kv_cache_dtype="fp8_e5m2"), "main")
    assert held.keys() >= set(names("batch"))
    assert held["vllm_max_num_seqs"] == 3
    assert held["vllm_kv_cache_dtype"] == "fp8_e5m2"


def test_a_served_model_has_the_same() -> None:
    assert (served.knobs, served.current, served.forbids) == (knobs, current, forbids)
