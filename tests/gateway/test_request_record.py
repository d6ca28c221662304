"""Timings of a request: the engine's own, completed by those of the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.events import Timings
from modelyard.gateway.request_record import gateway_timings

MEASURED: dict[str, Any] = {
    "now": 15.0,
    "arrived": 9.5,
    "started": 10.0,
    "engine_started": 12.0,
    "first_output": 13.0,
    "queue_s": 1.75,
    "tokenize_s": 0.25,
    "remote": False,
}


def test_timings_of_the_engine_are_kept_and_completed() -> None:
    engine = Timings(prefill=0.5, first_token=0.6, decode=2.0, backend=2.6, total=2.6)
    assert gateway_timings(engine, **MEASURED) == Timings(
        queue=1.75, tokenize=0.25, prefill=0.5, first_token=0.6, decode=2.0, backend=3.0, engine=5.25, total=5.5
    )


def test_an_engine_without_timings_is_timed_by_the_gateway() -> None:
    timings = gateway_timings(Timings(), **MEASURED)
    assert (timings.prefill, timings.first_token, timings.decode) == (None, 1.0, 2.0)


@pytest.mark.parametrize("change", [{"remote": True}, {"first_output": None}], ids=["remote", "no output"])
def test_an_unknown_first_token_time_is_not_guessed(change: dict[str, Any]) -> None:
    timings = gateway_timings(Timings(), **MEASURED | change)
    assert (timings.first_token, timings.decode, timings.backend) == (None, None, 3.0)


def test_without_an_arrival_time_the_total_starts_in_the_gateway() -> None:
    assert gateway_timings(Timings(), now=15.0, started=10.0, tokenize_s=0.25, remote=False) == Timings(
        queue=0.0, tokenize=0.25, engine=5.25, total=5.25
    )
