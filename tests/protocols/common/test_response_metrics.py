from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.events import Finished, Timings, Usage
from modelyard.protocols.common.response_metrics import ResponseMetrics, read_metrics, write_metrics

USAGE = Usage(prompt=47, cached=12, output=23, reasoning=3)
MEASURED = Timings(
    queue=0.002, tokenize=0.0015, first_token=0.04, decode=0.1, backend=0.1381, engine=0.1423, total=0.1435
)
FIELDS = {
    "backend_inference_wall_ms": 138.1,
    "engine_total_wall_ms": 142.3,
    "engine_outside_backend_wall_ms": 4.2,
    "pool_total_wall_ms": 143.5,
    "engine_queue_wait_ms": 2.0,
    "engine_tokenize_ms": 1.5,
    "gpu_time_to_first_token_ms": 40.0,
    "gpu_generate_total_ms": 140.0,
    "gpu_decode_after_first_token_ms": 100.0,
    "engine_prompt_tokens": 47,
    "engine_output_tokens": 23,
    "engine_tokens_per_second": 164.286,
}


def written(timings: Timings, usage: Usage = USAGE) -> Any:
    return msgspec.to_builtins(write_metrics(Finished("end", usage, timings=timings)))


def test_every_field_comes_of_what_was_measured() -> None:
    assert written(MEASURED) == FIELDS


def test_what_nobody_measured_is_null_and_still_there() -> None:
    told = written(Timings())
    assert list(told) == list(FIELDS)
    assert {name for name, value in told.items() if value is not None} == {
        "engine_prompt_tokens",
        "engine_output_tokens",
    }


def test_the_speed_is_of_the_backend_where_the_engine_keeps_its_times_to_itself() -> None:
    assert written(Timings(backend=2.0), Usage(output=10))["engine_tokens_per_second"] == 5.0


@pytest.mark.parametrize("backend", [None, 0.0])
def test_without_time_there_is_no_speed(backend: float | None) -> None:
    assert written(Timings(backend=backend))["engine_tokens_per_second"] is None


@given(
    st.builds(
        Timings,
        **{
            name: st.none() | st.floats(0, 1e5)
            for name in ("queue", "tokenize", "first_token", "decode", "backend", "engine", "total")
        },
    )
)
def test_written_read_and_written_again_they_are_the_same(timings: Timings) -> None:
    told = written(timings)
    assert written(read_metrics(told)) == told


@pytest.mark.parametrize("told", [None, {}, "fast", [1], {"pool_total_wall_ms": "long"}])
def test_what_another_server_means_by_metrics_is_no_time_of_ours(told: object) -> None:
    assert read_metrics(told) == Timings()


def test_the_names_are_the_dialects_own() -> None:
    assert set(ResponseMetrics.__struct_fields__) == set(FIELDS)
