"""Summaries: percentiles, rates and errors of rounds, and two subjects compared."""

from __future__ import annotations

import math

import msgspec
import pytest

from modelyard.benchmark.intervals import SAME
from modelyard.benchmark.sample import Round, Sample
from modelyard.benchmark.summary import (
    FIGURES,
    GAP,
    RATE,
    THROUGHPUT,
    TTFT,
    Figure,
    compare,
    percentile,
    spread,
    summarize,
)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([1.0, 2.0], 50, 1.0), ([1.0, 2.0], 90, 2.0), ([5.0], 99, 5.0), ([1.0, 2.0], 0, 1.0)],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_nothing_measured_has_no_percentiles() -> None:
    assert all(math.isnan(value) for value in msgspec.structs.astuple(spread([])))


def one(*samples: Sample, wall: float = 2.0, streams: int = 2) -> Round:
    return Round(streams=streams, wall_s=wall, samples=samples)


def answer(ttft: float, gap: float, tokens: int = 5, **more: object) -> Sample:
    whole = ttft + gap * (tokens - 1)
    return Sample(
        prompt_tokens=10, output_tokens=tokens, ttft_s=ttft, gaps_s=(gap,) * (tokens - 1), total_s=whole, **more
    )  # type: ignore[arg-type]


def test_a_summary_holds_all_that_tables_show() -> None:
    rounds = [one(answer(0.1, 0.01), answer(0.3, 0.02)), one(answer(0.2, 0.01, cached_tokens=4), wall=1.0)]
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


def test_answers_that_failed_are_counted_by_what_they_said_and_nowhere_else() -> None:
    broken = [answer(9.0, 9.0, error="full"), Sample(error="full"), Sample(error="gone")]
    found = summarize([one(answer(0.1, 0.01), *broken)])
    assert found.errors == {"full": 2, "gone": 1}
    assert (found.answers, found.output_tokens, found.ttft_s.p99) == (1, 5, 0.1)
    assert found.tokens_per_s.middle == pytest.approx(2.5)


def test_a_summary_of_nothing_is_still_one() -> None:
    found = summarize([])
    assert (found.answers, found.rounds, found.errors) == (0, 0, {})
    assert msgspec.json.decode(msgspec.json.encode(found))["ttft_s"]["p50"] is None


@pytest.mark.parametrize(("figure", "expected"), [(TTFT, 0.2), (GAP, 0.015), (RATE, 75.0), (THROUGHPUT, 5.0)])
def test_a_figure_is_one_number_of_a_round(figure: Figure, expected: float) -> None:
    assert figure.of(one(answer(0.1, 0.01), answer(0.3, 0.02))) == pytest.approx(expected)


def test_twice_as_fast_is_better_in_every_figure() -> None:
    noise = (1.0, 1.02, 0.98, 1.01)
    fast = [one(answer(0.1 * n, 0.01 * n), wall=0.15 * n, streams=4) for n in noise]
    slow = [one(answer(0.2, 0.02), wall=0.3, streams=4) for _ in noise]
    found = compare(fast, slow)
    assert [line.verdict for line in found] == ["better"] * 3
    assert [line.figure for line in found] == [figure.name for figure in FIGURES]
    assert {line.streams for line in found} == {4}
    assert found[0].ratio is not None
    assert found[0].ratio.middle == pytest.approx(0.5, abs=0.01)
    assert [line.verdict for line in compare(slow, fast)] == ["worse"] * 3


def test_more_lines_need_more_certainty() -> None:
    fast = [one(answer(ttft, 0.01)) for ttft in (0.08, 0.10, 0.09, 0.11)]
    slow = [one(answer(0.12, 0.01)) for _ in range(4)]
    assert compare(fast, slow, [TTFT])[0].verdict == "better"
    assert compare(fast, slow, [TTFT], lines=30)[0].verdict == SAME


def test_a_round_without_an_answer_is_left_out_of_both() -> None:
    lost = one(Sample(error="gone"))
    found = compare([lost, one(answer(0.1, 0.01))], [one(answer(9.0, 0.01)), one(answer(0.2, 0.01))], [TTFT])
    assert (found[0].first, found[0].second) == ((0.1,), (0.2,))


def test_nothing_in_common_is_not_measured() -> None:
    found = compare([one(Sample(error="gone"))], [one(answer(0.2, 0.01))])
    assert {(line.verdict, line.ratio) for line in found} == {("not measured", None)}
