"""Two servers that are alike, one with something on it that the other lacks, and then the other way round. Pure.

Two processes of the same program are never quite alike: one may take a few percent more for the same work all its life.
Where the something changes places, that difference counts once for it and once against it, and is gone from the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from bench.ratios import Interval, interval

Verdict = Literal["kept", "missed", "undecided"]


class Pair(Struct, frozen=True):
    """The same figure of both, from the same seconds or from seconds side by side."""

    having: float
    lacking: float


def added(pair: Pair) -> float:
    """How much more the one takes that has it."""
    return pair.having - pair.lacking


def lost(pair: Pair) -> float:
    """The share of what it could do that is lost, where the figure is what one piece of work takes. In logarithms, so
    that two of them can be added; `share` turns it back."""
    return math.log(pair.having / pair.lacking)


def share(logarithm: float) -> float:
    return 1 - math.exp(-logarithm)


def crossed(first: Sequence[Pair], second: Sequence[Pair], cost: Callable[[Pair], float]) -> list[float]:
    """`first` while one server has it, `second` while the other does: one value for each two pairs."""
    return [(cost(a) + cost(b)) / 2 for a, b in zip(first, second, strict=True)]


def all_crossed(blocks: Sequence[Sequence[Pair]], cost: Callable[[Pair], float]) -> Interval:
    """Of blocks in turns, two by two: the median and where it lies."""
    if not blocks or len(blocks) % 2:
        raise ValueError("each block needs one in which the servers have changed places")
    twos = zip(blocks[::2], blocks[1::2], strict=True)
    return interval([value for first, second in twos for value in crossed(first, second, cost)])


def judged(cost: Interval, target: float) -> Verdict:
    """A target is kept or missed by the whole interval; else more rounds are needed."""
    if cost.high < target:
        return "kept"
    return "missed" if cost.low >= target else "undecided"
