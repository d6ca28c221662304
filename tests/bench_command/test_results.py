"""Results: summaries of rounds, two targets compared, and what an interrupted run leaves."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard_bench.load import Round, RoundLength, Sample
from modelyard_bench.results import (
    METRICS,
    RATE,
    THROUGHPUT,
    TTFT,
    BenchmarkResults,
    Metric,
    Plan,
    Step,
    TargetInfo,
    compare,
    parse_duration,
    summarize,
)
from modelyard_bench.statistics import SAME
from modelyard_bench.workload import get_workload
from tests.bench_command.fakes import filled_results, sample

# Durations, the order of rounds, and how long each is.


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("30s", 30), ("10m", 600), ("1.5h", 5400), (" 2 M ", 120), ("0.5s", 0.5)]
)
def test_a_duration_is_parsed(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-3s", "0", "3d", "1m30s", "inf"])
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidRequest, match="such as 90, 30s, 10m or 1h"):
        parse_duration(text)


def plan(**more: object) -> Plan:
    return Plan(**{"workload": get_workload("chat"), "streams": (1, 4), **more})  # type: ignore[arg-type]


def test_targets_alternate_in_order_from_round_to_round() -> None:
    order = [(s.number, s.streams, s.target) for s in plan(rounds=2).steps(2) if not s.is_warmup]
    assert order == [(0, 1, 0), (0, 1, 1), (0, 4, 0), (0, 4, 1), (1, 1, 1), (1, 1, 0), (1, 4, 1), (1, 4, 0)]


def test_every_target_is_warmed_up_with_all_streams_before_the_first_round() -> None:
    first = list(plan(rounds=1).steps(2))[:2]
    assert first == [Step(0, 4, -1), Step(1, 4, -1)]
    assert all(step.is_warmup for step in first)
    assert not any(step.is_warmup for step in plan(warmup=0).steps(2))


def test_every_step_has_its_own_key() -> None:
    keys = [step.key for step in plan(rounds=3).steps(2)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("workload", "options", "streams", "expected"),
    [
        ("chat", {}, 4, RoundLength(conversations=2)),
        ("chat", {"requests": 10}, 4, RoundLength(conversations=3)),
        ("chat", {"requests": 1}, 4, RoundLength(conversations=1)),
        ("agent", {}, 2, RoundLength(conversations=1)),
        ("agent", {"requests": 9}, 2, RoundLength(conversations=2)),
        ("chat", {"seconds": 3.0}, 4, RoundLength(seconds=3.0)),
    ],
)
def test_a_round_has_whole_conversations(
    workload: str, options: dict[str, float], streams: int, expected: RoundLength
) -> None:
    assert plan(workload=get_workload(workload), **options).round_length(streams) == expected


def test_the_size_of_a_step_is_its_responses_or_its_seconds() -> None:
    agent = plan(workload=get_workload("agent", turns=3), streams=(1, 2), rounds=2)
    assert agent.size(Step(0, 2, 0)) == 6
    assert agent.size(Step(0, 2, -1)) == 6
    assert plan(seconds=5.0).size(Step(0, 1, 0)) == 5.0


def one(*samples: Sample, wall: float = 2.0, streams: int = 2) -> Round:
    return Round(streams=streams, wall_s=wall, samples=samples)


def response(ttft: float, gap: float, tokens: int = 5, **more: object) -> Sample:
    total = ttft + gap * (tokens - 1)
    return Sample(
        prompt_tokens=10, output_tokens=tokens, ttft_s=ttft, gaps_s=(gap,) * (tokens - 1), total_s=total, **more
    )  # type: ignore[arg-type]


def test_a_summary_has_all_that_tables_show() -> None:
    rounds = [one(response(0.1, 0.01), response(0.3, 0.02)), one(response(0.2, 0.01, cached_tokens=4), wall=1.0)]
    found = summarize(rounds)
    assert (found.streams, found.rounds, found.answers, found.errors) == (2, 2, 3, {})
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (30, 4, 15)
    assert (found.ttft_s.p50, found.ttft_s.p90, found.ttft_s.p99) == (0.2, 0.3, 0.3)
    assert found.ttft_s.mean == pytest.approx(0.2)
    assert (found.gap_s.p50, found.gap_s.p99) == (0.01, 0.02)
    assert found.stream_rate.p50 == pytest.approx(100.0)
    assert found.prompt_rate.p99 == pytest.approx(100.0)
    assert found.prompt_rate.p50 == pytest.approx(10 / 0.3)
    assert found.tokens_per_s.middle == pytest.approx((10 / 2 + 5 / 1) / 2)
    assert found.requests_per_s.middle == pytest.approx(1.0)
    assert (found.wall_s, found.is_counted) == (3.0, False)


def test_failed_requests_are_counted_by_message_and_nowhere_else() -> None:
    failed = [response(9.0, 9.0, error="full"), Sample(error="full"), Sample(error="gone")]
    found = summarize([one(response(0.1, 0.01), *failed)])
    assert found.errors == {"full": 2, "gone": 1}
    assert (found.answers, found.output_tokens, found.ttft_s.p99) == (1, 5, 0.1)
    assert found.tokens_per_s.middle == pytest.approx(2.5)


def test_a_summary_of_nothing_is_valid_json() -> None:
    found = summarize([])
    assert (found.answers, found.rounds, found.errors) == (0, 0, {})
    assert msgspec.json.decode(msgspec.json.encode(found))["ttft_s"]["p50"] is None


@pytest.mark.parametrize(("metric", "expected"), [(TTFT, 0.2), (RATE, 75.0), (THROUGHPUT, 5.0)])
def test_a_metric_is_one_number_of_a_round(metric: Metric, expected: float) -> None:
    assert metric.of(one(response(0.1, 0.01), response(0.3, 0.02))) == pytest.approx(expected)


def test_a_target_twice_as_fast_is_better_in_every_metric() -> None:
    noise = (1.0, 1.02, 0.98, 1.01)
    fast = [one(response(0.1 * n, 0.01 * n), wall=0.15 * n, streams=4) for n in noise]
    slow = [one(response(0.2, 0.02), wall=0.3, streams=4) for _ in noise]
    found = compare(fast, slow)
    assert [line.verdict for line in found] == ["better"] * 3
    assert [line.figure for line in found] == [metric.name for metric in METRICS]
    assert {line.streams for line in found} == {4}
    assert found[0].ratio is not None
    assert found[0].ratio.middle == pytest.approx(0.5, abs=0.01)
    assert [line.verdict for line in compare(slow, fast)] == ["worse"] * 3


def test_more_comparisons_need_more_certainty() -> None:
    fast = [one(response(ttft, 0.01)) for ttft in (0.08, 0.10, 0.09, 0.11)]
    slow = [one(response(0.12, 0.01)) for _ in range(4)]
    assert compare(fast, slow, [TTFT])[0].verdict == "better"
    assert compare(fast, slow, [TTFT], comparisons=30)[0].verdict == SAME


def test_a_round_without_a_response_is_left_out_of_both_sides() -> None:
    lost = one(Sample(error="gone"))
    found = compare([lost, one(response(0.1, 0.01))], [one(response(9.0, 0.01)), one(response(0.2, 0.01))], [TTFT])
    assert (found[0].first, found[0].second) == ((0.1,), (0.2,))


def test_targets_without_a_common_round_are_not_compared() -> None:
    found = compare([one(Sample(error="gone"))], [one(response(0.2, 0.01))])
    assert {(line.verdict, line.ratio) for line in found} == {("not measured", None)}


# --- a run ------------------------------------------------------------------------------------------------------------


def test_summaries_are_ordered_by_streams_then_target_and_leave_the_warm_up_out() -> None:
    results = filled_results(1.0, 2.0)
    rows = [(found.streams, target.label, found.rounds, found.answers) for target, found, _ in results.summaries()]
    assert rows == [(1, "A", 4, 4), (1, "B", 4, 4), (4, "A", 4, 16), (4, "B", 4, 16)]
    assert len(results.warmup) == 2


def test_every_later_target_is_compared_with_the_first() -> None:
    pairings = filled_results(1.0, 2.0, 1.0, streams=(1,)).pairings()
    assert [(p.target.label, p.first.label) for p in pairings] == [("B", "A")] * 3 + [("C", "A")] * 3
    assert [p.found.verdict for p in pairings] == ["worse"] * 3 + [SAME] * 3
    assert filled_results(1.0).pairings() == []


def empty() -> BenchmarkResults:
    plan = Plan(workload=get_workload("chat"), streams=(1,))
    return BenchmarkResults(plan, [TargetInfo("A", "a"), TargetInfo("B", "b", "given")])


def test_an_interrupted_round_counts_only_where_there_is_no_complete_one() -> None:
    results = empty()
    results.add(Step(0, 1, 0), one(sample()))
    results.add(Step(0, 1, 1), one(sample(), sample()), complete=False)
    results.add(Step(1, 1, 0), one(sample(), sample(), sample()), complete=False)
    assert [(target.label, found.answers) for target, found, _ in results.summaries()] == [("A", 1), ("B", 3)]
    assert results.pairings() == []
    assert results.answers == 4


def test_a_round_interrupted_before_its_first_response_does_not_count() -> None:
    results = empty()
    results.add(Step(0, 1, 0), one(), complete=False)
    assert list(results.summaries()) == []


def test_errors_of_the_warm_up_are_kept_apart() -> None:
    results = empty()
    results.add(Step(0, 1, -1), one(Sample(error="cold")))
    assert results.warmup_errors == {"cold": 1}
    assert results.answers == 0


def test_a_target_without_a_given_model_shows_the_servers_name() -> None:
    results = empty()
    results.set_models(["found", "other"])
    assert [target.model for target in results.targets] == ["found", "given"]
