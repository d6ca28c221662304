"""The benchmark's table: medians, ratios, targets."""

from __future__ import annotations

import io

from rich.console import Console

from bench.growth import Growth
from bench.load import Outcome
from bench.measure import Sample, Samples
from bench.phases import OURS, PASSING_ON, THEIRS, Added, Plan, Results
from bench.report import notes, rows, show
from bench.stats import Latencies


def samples(*answers: int, errors: int = 0, rss: float = 200.0, others: float = 0.0) -> Samples:
    times = Latencies(1.0, 2.0, 100.0, 110.0)
    outcomes = [
        Outcome(answers=n, errors=errors, seconds=2.0, events=n * 19, in_flight=1000, latencies=times) for n in answers
    ]
    return Samples(tuple(Sample(outcome, 1.0, rss, others) for outcome in outcomes))


def results(**changed: object) -> Results:
    fields: dict[str, object] = {
        "plan": Plan(),
        "requests": {OURS: samples(5000, 6000, 7000), THEIRS: samples(100, 100, 100)},
        "events": {OURS: samples(1000), THEIRS: samples(10)},
        "streams": samples(5000),
        "added": Added(0.6, 1.1, 0.1),
        "growth": Growth(20_000, 50.0, 1.5, 3.0, 0.2),
    }
    return Results(**(fields | changed))  # type: ignore[arg-type]


def test_ours_theirs_and_the_ratio_stand_side_by_side():
    first = next(rows(results()))
    assert (first.ours, first.theirs, first.ratio) == ("6,000 ±17%", "100 ±0%", "60.0× ±17%")
    assert (first.target, first.met) == ("≥ 5,000, ≥ 50×", True)


def test_a_proxy_with_a_server_behind_it_has_a_row_and_a_target_of_its_own():
    found = {OURS: samples(6000), THEIRS: samples(200), PASSING_ON: samples(100)}
    first, second, *_ = rows(results(requests=found))
    assert (first.ratio, first.met) == ("30.0×", False)
    assert (second.theirs, second.ratio, second.target, second.met) == ("100", "60.0×", "≥ 50×", True)


def test_a_target_is_missed_by_the_ratio_alone():
    rival = {OURS: samples(6000), THEIRS: samples(200)}
    assert next(rows(results(requests=rival))).met is False


def test_without_litellm_only_our_own_target_counts():
    first = next(rows(results(requests={OURS: samples(6000)})))
    assert (first.theirs, first.ratio, first.target, first.met) == ("", "", "≥ 5,000", True)


def test_errors_memory_and_latency_miss_their_targets():
    poor = results(streams=samples(10, errors=1, rss=301.0), added=Added(1.2, 5.2, 0.1))
    assert [row.what.strip() for row in rows(poor) if row.met is False] == [
        *("errors", "RSS", "added TTFT p50, one request at a time", "added TTFT p99")
    ]


def test_a_busy_machine_is_told():
    assert not any("other work" in note for note in notes(results()))
    assert any("1.3 cores" in note for note in notes(results(streams=samples(10, others=1.3))))


def test_the_table_names_the_load_generator():
    out = io.StringIO()
    show(results(), Console(file=out, width=200))
    assert "bench/load.py" in out.getvalue()
    assert "LiteLLM 1." in out.getvalue()
