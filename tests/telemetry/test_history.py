from __future__ import annotations

import pytest

from modelyard.core.events import Timings, Usage
from modelyard.telemetry.history import History, RequestRecord


def record(trace: str = "a", at: float = 1000.0, **more: object) -> RequestRecord:
    return RequestRecord(trace=trace, model="m", cache="c", at=at, **{"status": "end", **more})  # type: ignore[arg-type]


def test_a_request_is_found_by_its_trace_with_all_choices() -> None:
    history = History(10)
    history.add(record("a", status="end"))
    history.add(record("b"))
    history.add(record("a", status="max_tokens"))
    assert [one.status for one in history.find("a")] == ["end", "max_tokens"]
    assert history.find("missing") == []


def test_recent_lists_the_newest_first_and_drops_the_oldest() -> None:
    history = History(3)
    for trace in "abcd":
        history.add(record(trace))
    assert [one.trace for one in history.recent(10)] == ["d", "c", "b"]
    assert [one.trace for one in history.recent(1)] == ["d"]
    assert history.find("a") == []


def test_requests_are_summed_by_interval() -> None:
    history = History(10)
    usage, timings = Usage(prompt=100, cached=60, output=11), Timings(first_token=0.5, decode=2.0)
    history.add(record(at=1000, usage=usage, timings=timings))
    history.add(record(at=1009.9, failed=True, status="unavailable"))
    history.add(record(at=1010, usage=usage))
    first, second = history.intervals(1010)
    assert (first.at, first.requests, first.failures, first.prompt, first.cached, first.output) == (
        1000,
        2,
        1,
        100,
        60,
        11,
    )
    assert (first.first_token_s, first.inter_token_s) == ([0.5], [0.2])
    assert first.tokens_per_s == [pytest.approx(5.0)]
    assert (second.at, second.requests, second.first_token_s) == (1010, 1, [])


def test_samples_of_an_interval_are_bounded() -> None:
    history = History(10)
    for _ in range(1000):
        history.add(record(usage=Usage(output=2), timings=Timings(first_token=0.1, decode=0.1)))
    (only,) = history.intervals(1000)
    assert only.requests == 1000
    assert len(only.first_token_s) == len(only.inter_token_s) == 64


def test_intervals_older_than_an_hour_are_hidden() -> None:
    history = History(10)
    history.add(record(at=1000))
    history.add(record(at=5000))
    assert [one.at for one in history.intervals(5000)] == [5000]


def test_an_interval_keeps_its_longest_queue() -> None:
    history = History(10)
    for now, waiting in ((1000, 3), (1001, 7), (1002, 1), (1011, 2)):
        history.add_queue_length(now, waiting)
    assert [one.waiting for one in history.intervals(1011)] == [7, 2]


def test_a_clock_that_goes_back_is_harmless() -> None:
    history = History(10)
    history.add(record(at=2000))
    history.add(record(at=1000))
    assert sum(one.requests for one in history.intervals(2000)) == 2
