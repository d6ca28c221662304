"""Means with their confidence, and whether two interleaved series differ by more than the noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import Literal

from msgspec import Struct

Verdict = Literal["better", "worse", "no difference beyond noise"]
SAME: Verdict = "no difference beyond noise"


class Interval(Struct, frozen=True):
    """Between `low` and `high` the true value lies, with the confidence that was asked for."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """By Student's t: of a handful of rounds a bootstrap promises more than it keeps. Of one value nothing is known."""
    middle = fmean(values) if values else math.nan
    if len(values) < 2:
        return Interval(middle, -math.inf, math.inf)
    reach = t_quantile(len(values) - 1, confidence) * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - reach, middle + reach)


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """The geometric mean of ours over theirs, round by round: what disturbed a round has disturbed both.

    In logarithms, where twice as fast and half as fast are equally far from the same.
    """
    if not ours or min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs at least one round, and values above 0")
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    found = mean_interval(logs, confidence)
    high = math.exp(found.high) if found.high < 700 else math.inf  # exp overflows beyond
    return Interval(math.exp(found.middle), math.exp(found.low), high)


def verdict(ratio: Interval, want: Literal["higher", "lower"], margin: float = 0.0) -> Verdict:
    """Of the first against the second. `margin` is what must be gained for it to count, such as 0.02 for 2 %."""
    if ratio.low > 1 + margin:
        return "better" if want == "higher" else "worse"
    if ratio.high < 1 / (1 + margin):
        return "worse" if want == "higher" else "better"
    return SAME


def is_better(
    ours: Sequence[float],
    theirs: Sequence[float],
    want: Literal["higher", "lower"] = "higher",
    *,
    confidence: float = 0.95,
    margin: float = 0.0,
) -> bool:
    """Whether ours is better than theirs beyond the noise of these interleaved rounds."""
    return verdict(ratio_interval(ours, theirs, confidence), want, margin) == "better"


def together(confidence: float, lines: int) -> float:
    """The confidence each of several intervals needs so that all hold at once: of twenty at 95 %, one would lie."""
    return 1 - (1 - confidence) / max(1, lines)


def t_quantile(freedom: int, confidence: float) -> float:
    """How many standard errors to each side hold `confidence` of Student's t."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """The share of Student's t between -t and t: a finite series, as the degrees of freedom are whole."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    if freedom % 2:
        factors = (square * (2 * n) / (2 * n + 1) for n in range(1, (freedom - 1) // 2))
        series = sum(accumulate(factors, lambda a, b: a * b, initial=math.cos(angle))) if freedom > 1 else 0.0
        return 2 / math.pi * (angle + math.sin(angle) * series)
    factors = (square * (2 * n - 1) / (2 * n) for n in range(1, freedom // 2))
    return math.sin(angle) * sum(accumulate(factors, lambda a, b: a * b, initial=1.0))
