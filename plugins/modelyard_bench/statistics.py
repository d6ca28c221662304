"""Percentiles, confidence intervals and paired comparisons for every measurement in this project. Pure.

Intervals come from Student's t over rounds, and ratios are compared in logarithms, round by round: what disturbs the
machine during a round disturbs both sides and cancels out. A bootstrap is not used, because over a handful of rounds
it gives intervals that are too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from statistics import fmean, stdev
from typing import Literal

from msgspec import Struct

Better = Literal["higher", "lower"]
Verdict = Literal["better", "worse", "no difference beyond noise"]
SAME: Verdict = "no difference beyond noise"


# --- one quantity -----------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: always a measured value; nan without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class Distribution(Struct, frozen=True):
    """One quantity over all responses; nan (null in JSON) where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        mean = fmean(values) if values else math.nan
        return cls(mean, *(percentile(values, percent) for percent in (50, 90, 99)))


class Interval(Struct, frozen=True):
    """An estimate and its confidence interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            return f"{self.middle:.3f}"
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of a monotonically increasing function of the estimate."""
        return Interval(function(self.middle), function(self.low), function(self.high))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The arithmetic mean. A single value has an infinite interval."""
    mean = fmean(values) if values else math.nan
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    margin = t_quantile(len(values) - 1, confidence) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - margin, mean + margin)


# --- two series, measured in interleaved rounds -----------------------------------------------------------------------


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """The geometric mean of the ratios of each round. In logarithms, 2x and 0.5x are equally far from 1x."""
    if not ours or min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs at least one round, and values above 0")
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    return mean_interval(logs, confidence).map(lambda log: math.exp(log) if log < 700 else math.inf)


def verdict(ratio: Interval, better: Better, margin: float = 0.0) -> Verdict:
    """The first series against the second. A difference counts only if the whole interval exceeds `margin`."""
    if ratio.low > 1 + margin:
        return "better" if better == "higher" else "worse"
    if ratio.high < 1 / (1 + margin):
        return "worse" if better == "higher" else "better"
    return SAME


def joint_confidence(confidence: float, comparisons: int) -> float:
    """The confidence that each of several intervals needs so that all of them hold together (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, comparisons)


# --- Student's t ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def t_quantile(freedom: int, confidence: float) -> float:
    """How many standard errors on each side contain `confidence` of the distribution."""
    low, high = 0.0, 1.0
    while _t_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _t_probability(t: float, freedom: int) -> float:
    """The probability between -t and t; a finite series, because the degrees of freedom are an integer."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    if freedom % 2:
        factors = (square * (2 * n) / (2 * n + 1) for n in range(1, (freedom - 1) // 2))
        series = sum(accumulate(factors, lambda a, b: a * b, initial=math.cos(angle))) if freedom > 1 else 0.0
        return 2 / math.pi * (angle + math.sin(angle) * series)
    factors = (square * (2 * n - 1) / (2 * n) for n in range(1, freedom // 2))
    return math.sin(angle) * sum(accumulate(factors, lambda a, b: a * b, initial=1.0))
