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


def test_every_field_is_computed_from_the_timings() -> None:
    assert written(MEASURED) == FIELDS


def test_missing_timings_are_null() -> None:
    body = written(Timings())
    assert list(body) == list(FIELDS)
    assert {name for name, value in body.items() if value is not None} == {
        "engine_prompt_tokens",
        "engine_output_tokens",
    }


def test_the_speed_uses_the_backend_time_if_the_engine_has_no_timings() -> None:
    assert written(Timings(backend=2.0), Usage(output=10))["engine_tokens_per_second"] == 5.0


@pytest.mark.parametrize("backend", [None, 0.0])
def test_the_speed_is_null_without_a_time(backend: float | None) -> None:
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
def test_a_round_trip_changes_nothing(timings: Timings) -> None:
    body = written(timings)
    assert written(read_metrics(body)) == body


@pytest.mark.parametrize("body", [None, {}, "fast", [1], {"pool_total_wall_ms": "long"}])
def test_metrics_of_another_shape_read_as_empty_timings(body: object) -> None:
    assert read_metrics(body) == Timings()


def test_the_field_names_are_those_of_the_dialect() -> None:
    assert set(ResponseMetrics.__struct_fields__) == set(FIELDS)
