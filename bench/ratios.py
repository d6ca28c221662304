"""Ratios of what was measured in the same round, with a confidence interval by bootstrap."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Literal

from msgspec import Struct

from bench.stats import percentile

_DRAWS = 4000


class Interval(Struct, frozen=True):
    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median, and between which values it lies when rounds are drawn anew from those measured."""
    dice, tail = random.Random(0), 100 * (1 - confidence) / 2
    medians = [median(dice.choices(values, k=len(values))) for _ in range(_DRAWS)]
    return Interval(median(values), percentile(medians, tail), percentile(medians, 100 - tail))


class Comparison(Struct, frozen=True):
    """One figure of two subjects, round by round. `bound` is the target for the ratio of the first to the second."""

    what: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    bound: float | None = None
    want: Literal["at least", "at most"] = "at least"

    @property
    def ratio(self) -> Interval:
        return interval([a / b for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def target(self) -> str:
        sign = "≥" if self.want == "at least" else "≤"
        return "" if self.bound is None else f"{sign} {self.bound:g}×"

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        middle = self.ratio.middle
        return middle >= self.bound if self.want == "at least" else middle <= self.bound
