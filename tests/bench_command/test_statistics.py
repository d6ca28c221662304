"""Percentiles, intervals against tables of Student's t and against simulated noise, and paired comparisons."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from modelyard_bench.statistics import (
    SAME,
    Distribution,
    Interval,
    joint_confidence,
    mean_interval,
    percentile,
    ratio_interval,
    t_quantile,
    verdict,
)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.0),
        ([1.0, 2.0], 90, 2.0),
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 0, 1.0),
        (list(range(100, 0, -1)), 99, 99),
    ],
)
def test_a_percentile_is_a_measured_value(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_no_values_have_no_percentiles() -> None:
    assert math.isnan(percentile([], 50))
    assert all(math.isnan(value) for value in msgspec.structs.astuple(Distribution.of([])))


@pytest.mark.parametrize(
    ("freedom", "confidence", "quantile"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.99, 4.604),
        (5, 0.95, 2.571),
        (9, 0.90, 1.833),
        (10, 0.999, 4.587),
        (30, 0.95, 2.042),
        (120, 0.95, 1.980),
    ],
)
def test_quantiles_match_the_printed_tables(freedom: int, confidence: float, quantile: float) -> None:
    assert t_quantile(freedom, confidence) == pytest.approx(quantile, abs=6e-4)


def test_the_interval_of_a_mean_follows_its_noise() -> None:
    assert mean_interval([4.0, 6.0]) == Interval(
        5.0, pytest.approx(5 - 12.7062, abs=1e-3), pytest.approx(5 + 12.7062, abs=1e-3)
    )
    assert mean_interval([3.0, 3.0, 3.0]) == Interval(3.0, 3.0, 3.0)


def test_one_value_has_an_infinite_interval_and_none_has_no_mean() -> None:
    assert mean_interval([2.0]) == Interval(2.0, -math.inf, math.inf)
    assert math.isnan(mean_interval([]).middle)


def test_a_ratio_is_the_geometric_mean_of_the_rounds() -> None:
    found = ratio_interval([2.0, 8.0], [1.0, 1.0])
    assert found.middle == pytest.approx(4.0)
    assert found.low * found.high == pytest.approx(16.0)


def test_a_disturbance_of_both_sides_of_a_round_leaves_the_ratio_alone() -> None:
    found = ratio_interval([10.0, 5.0, 1.0], [20.0, 10.0, 2.0])
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_a_ratio_of_one_round_has_an_infinite_interval() -> None:
    assert ratio_interval([3.0], [1.0]) == Interval(pytest.approx(3.0), 0.0, math.inf)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [-1.0])])
def test_a_ratio_without_positive_values_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="a ratio needs"):
        ratio_interval(ours, theirs)


def test_rounds_without_a_counterpart_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_interval([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("low", "high", "better", "margin", "expected"),
    [
        (1.01, 1.2, "higher", 0.0, "better"),
        (1.01, 1.2, "lower", 0.0, "worse"),
        (0.8, 0.99, "lower", 0.0, "better"),
        (0.8, 0.99, "higher", 0.0, "worse"),
        (0.9, 1.1, "higher", 0.0, SAME),
        (1.0, 1.1, "higher", 0.0, SAME),
        (1.01, 1.2, "higher", 0.02, SAME),
        (1.03, 1.2, "higher", 0.02, "better"),
        (0.9, 0.99, "lower", 0.02, SAME),
    ],
)
def test_a_difference_counts_if_the_whole_interval_shows_it(
    low: float, high: float, better: str, margin: float, expected: str
) -> None:
    assert verdict(Interval(1.0, low, high), better, margin) == expected  # type: ignore[arg-type]


def _noisy(rng: random.Random, rounds: int, gain: float) -> tuple[list[float], list[float]]:
    """Rounds of two targets: the machine's own drift under both, and noise of 5 % on each."""
    drift = [math.exp(rng.gauss(0, 0.3)) for _ in range(rounds)]
    first = [base * math.exp(rng.gauss(0, 0.05)) * gain for base in drift]
    return first, [base * math.exp(rng.gauss(0, 0.05)) for base in drift]


@pytest.mark.parametrize("rounds", [3, 5, 8])
def test_equal_targets_differ_no_more_often_than_the_confidence_allows(rounds: int) -> None:
    rng = random.Random(7)
    pairs = [_noisy(rng, rounds, 1.0) for _ in range(2000)]
    different = sum(verdict(ratio_interval(*pair), "higher") != SAME for pair in pairs)
    assert 0.03 < different / len(pairs) < 0.07


def test_a_gain_of_a_fifth_is_found_in_six_noisy_rounds() -> None:
    rng = random.Random(8)
    found = [verdict(ratio_interval(*_noisy(rng, 6, 1.2)), "higher") for _ in range(200)]
    assert found.count("better") > 190


def test_several_comparisons_share_the_allowed_error() -> None:
    assert joint_confidence(0.95, 1) == pytest.approx(0.95)
    assert joint_confidence(0.95, 10) == pytest.approx(0.995)


def test_an_interval_prints_its_ends_if_it_has_any() -> None:
    assert str(Interval(1.0, 0.9, 1.125)) == "1.000 [0.900, 1.125]"
    assert str(Interval(1.0, 0.0, math.inf)) == "1.000"
