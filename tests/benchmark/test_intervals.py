"""Intervals against tables of Student's t, and what they promise against simulated noise."""

from __future__ import annotations

import math
import random

import pytest

from modelyard.benchmark.intervals import (
    SAME,
    Interval,
    is_better,
    mean_interval,
    ratio_interval,
    t_quantile,
    together,
    verdict,
)


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
def test_quantiles_are_those_of_the_printed_tables(freedom: int, confidence: float, quantile: float) -> None:
    assert t_quantile(freedom, confidence) == pytest.approx(quantile, abs=6e-4)


def test_a_mean_reaches_as_far_as_its_noise() -> None:
    assert mean_interval([4.0, 6.0]) == Interval(
        5.0, pytest.approx(5 - 12.7062, abs=1e-3), pytest.approx(5 + 12.7062, abs=1e-3)
    )
    assert mean_interval([3.0, 3.0, 3.0]) == Interval(3.0, 3.0, 3.0)


def test_of_one_value_nothing_is_known_and_of_none_not_even_that() -> None:
    assert mean_interval([2.0]) == Interval(2.0, -math.inf, math.inf)
    assert math.isnan(mean_interval([]).middle)


def test_a_ratio_is_the_geometric_mean_of_the_rounds() -> None:
    found = ratio_interval([2.0, 8.0], [1.0, 1.0])
    assert found.middle == pytest.approx(4.0)
    assert found.low * found.high == pytest.approx(16.0)


def test_what_disturbed_both_of_a_round_leaves_the_ratio_alone() -> None:
    found = ratio_interval([10.0, 5.0, 1.0], [20.0, 10.0, 2.0])
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_one_round_reaches_from_nothing_to_everything() -> None:
    assert ratio_interval([3.0], [1.0]) == Interval(pytest.approx(3.0), 0.0, math.inf)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [-1.0])])
def test_a_ratio_of_nothing_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="a ratio needs"):
        ratio_interval(ours, theirs)


@pytest.mark.parametrize(
    ("low", "high", "want", "margin", "said"),
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
def test_a_difference_counts_when_the_whole_interval_shows_it(
    low: float, high: float, want: str, margin: float, said: str
) -> None:
    assert verdict(Interval(1.0, low, high), want, margin) == said  # type: ignore[arg-type]


def test_better_is_asked_in_one_word() -> None:
    fast, slow = [10.0, 10.5, 9.8, 10.1], [8.0, 8.2, 7.9, 8.1]
    assert is_better(fast, slow)
    assert not is_better(slow, fast)
    assert is_better(slow, fast, "lower")
    assert not is_better(fast, slow, margin=0.5)
    assert not is_better(fast[:1], slow[:1])


def _noisy(dice: random.Random, rounds: int, gain: float) -> tuple[list[float], list[float]]:
    """Rounds of two subjects with the machine's own waves under both, and noise of 5 % on each."""
    waves = [math.exp(dice.gauss(0, 0.3)) for _ in range(rounds)]
    first = [wave * math.exp(dice.gauss(0, 0.05)) * gain for wave in waves]
    return first, [wave * math.exp(dice.gauss(0, 0.05)) for wave in waves]


@pytest.mark.parametrize("rounds", [3, 5, 8])
def test_equal_subjects_are_told_apart_no_oftener_than_promised(rounds: int) -> None:
    dice = random.Random(7)
    pairs = [_noisy(dice, rounds, 1.0) for _ in range(2000)]
    told_apart = sum(verdict(ratio_interval(*pair), "higher") != SAME for pair in pairs)
    assert 0.03 < told_apart / len(pairs) < 0.07


def test_a_fifth_more_is_found_in_six_noisy_rounds() -> None:
    dice = random.Random(8)
    assert sum(is_better(*_noisy(dice, 6, 1.2)) for _ in range(200)) > 190


def test_several_intervals_share_the_doubt() -> None:
    assert together(0.95, 1) == pytest.approx(0.95)
    assert together(0.95, 10) == pytest.approx(0.995)


def test_an_interval_reads_as_a_sentence() -> None:
    assert str(Interval(1.0, 0.9, 1.125)) == "1.000 [0.900, 1.125]"
