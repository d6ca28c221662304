"""What a search knows so far: every score of every setting, what failed and why, and how noisy the machine is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean

from modelyard.benchmark.statistics import t_quantile
from modelyard.core.knobs import Setting

_NOISE, _WEIGHT = 0.03, 3  # believed before anything is measured: 3 %, and as many measurements as that counts for


class Ledger:
    def __init__(self) -> None:
        self.scores: dict[Setting, list[float]] = {}
        self.failures: dict[Setting, str] = {}  # why a setting could not be measured at all
        self.refused: dict[Setting, str] = {}  # by the quality bound, with the loss
        self.behind: dict[Setting, float] = {}  # how far behind the winner of its last race, in logarithms; latest last
        self.out_of_time = False

    def add(self, setting: Setting, score: float) -> None:
        self.scores.setdefault(setting, []).append(score)

    def is_behind(self, setting: Setting, far: float) -> None:
        self.behind.pop(setting, None)
        self.behind[setting] = far

    @property
    def trials(self) -> int:
        return sum(map(len, self.scores.values())) + len(self.failures)

    def mean(self, setting: Setting) -> float:
        return log_mean(self.scores[setting])

    @property
    def knows_noise(self) -> bool:
        """Whether anything was measured twice; else it is only believed."""
        return any(len(scores) > 1 for scores in self.scores.values())

    def noise(self) -> tuple[float, int]:
        """The spread of one measurement in logarithms, and the degrees of freedom behind it.

        Pooled over all settings: two measurements of one say next to nothing, thirty of ten say much.
        """
        repeated = [scores for scores in self.scores.values() if len(scores) > 1]
        squares = sum((math.log(score) - log_mean(scores)) ** 2 for scores in repeated for score in scores)
        freedom = sum(len(scores) - 1 for scores in repeated) + _WEIGHT
        return math.sqrt((squares + _WEIGHT * _NOISE**2) / freedom), freedom

    def reach(self, ours: int, theirs: int, confidence: float) -> float:
        """How far apart the means of so many measurements may lie by noise alone."""
        spread, freedom = self.noise()
        return _quantile(freedom, confidence) * spread * math.sqrt(1 / ours + 1 / theirs)


def log_mean(scores: Sequence[float]) -> float:
    return fmean(map(math.log, scores))


def leader(scores: Mapping[Setting, Sequence[float]]) -> Setting:
    return max(scores, key=lambda setting: log_mean(scores[setting]))


@lru_cache(maxsize=512)
def _quantile(freedom: int, confidence: float) -> float:
    return t_quantile(freedom, confidence)
