"""Samples tokens with numpy: temperature, top_p and min_p, without a top_k. Pure.

llama.cpp's samplers build a list of the whole vocabulary for each token, and some sort it. Here numpy works on the row
of logits in place: truncation leaves some dozens of tokens, and without truncation the draw goes by sums of blocks. For
49,152 tokens that takes 0.03 to 0.1 ms instead of up to 4 ms. The order is llama.cpp's: top_p, min_p, temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf, isfinite, log, nextafter
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import MT19937

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.logit_columns import ColumnSearch, Row, TokenIds

Floats = npt.NDArray[np.float64]

_BLOCK = 256  # tokens whose probabilities are summed before one of them is drawn
_NUCLEUS = 256  # a top_p rarely keeps more tokens
_PART = 16_384  # tokens whose weights are summed at once
_BINS, _BINS_PER_NAT = 256, 8
_BELOW_ONE = nextafter(1.0, 0.0)
MIN_TEMPERATURE = 1e-6  # below it only overflows change


def uniform_numbers(seed: int) -> Callable[[], float]:
    """The numbers that llama.cpp draws with this seed: C++'s `mt19937` and `uniform_real_distribution<double>`. So a
    request with a seed gets the tokens that it would get there."""
    generator = MT19937(0)
    generator._legacy_seeding(seed)
    draw = generator.random_raw

    def number() -> float:
        low, high = draw(2).tolist()
        return float(min((low + high * 2.0**32) / 2.0**64, _BELOW_ONE))

    return number


class NumpySampler:
    """The sampler of one job."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.random = uniform_numbers(seed)
        self.is_seeded = sampling.seed is not None
        self.temperature = 1.0 if sampling.temperature is None else max(sampling.temperature, MIN_TEMPERATURE)
        self.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_gap = log(sampling.min_p) if sampling.min_p else -inf  # how far below the best logit others may be

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.min_gap > -inf

    def sample(self, row: Row) -> int:
        """If the logits are not finite, any token."""
        token = self._sample_truncated(row) if self.truncates else self._sample_all(row)
        return int(row.argmax()) if token is None else token

    def truncate(self, row: Row) -> tuple[TokenIds, Floats]:
        """The tokens that are left, and the gap of each to the best logit: 0 or negative."""
        if self.top_p < 1:
            ids = nucleus(row, self.top_p)
        else:
            ids = np.flatnonzero(row >= row.max() + np.float32(self.min_gap))
        gaps = row[ids].astype(np.float64)
        best = gaps.max(initial=-inf)
        if not isfinite(best):
            return ids[:0], gaps[:0]
        gaps -= best
        if self.min_gap > -inf:
            near = gaps >= self.min_gap
            ids, gaps = ids[near], gaps[near]
        return ids, gaps

    def _sample_truncated(self, row: Row) -> int | None:
        ids, gaps = self.truncate(row)
        sums = np.exp(gaps / self.temperature).cumsum()
        return int(ids[_draw(sums, self.random())]) if len(sums) else None

    def _sample_all(self, row: Row) -> int | None:
        """Draws a block by its sum, then a token of the block with the rest of the same random number."""
        best = row.max()
        if not isfinite(best):
            return None
        weights = row - best
        weights /= np.float32(self.temperature)
        np.exp(weights, out=weights)
        starts = _block_starts(len(row))
        sums = np.add.reduceat(weights, starts).astype(np.float64).cumsum()
        target = self.random() * sums[-1]
        block = min(int(sums.searchsorted(target, "right")), len(sums) - 1)
        before = sums[block - 1] if block else 0.0
        inner = weights[starts[block] : starts[block] + _BLOCK].cumsum(dtype=np.float64)
        return int(starts[block]) + _draw(inner, (target - before) / (sums[block] - before))


def top_tokens(row: Row, count: int) -> TokenIds:
    """The `count` most likely tokens, in order; fewer if no others are possible."""
    ids = ColumnSearch().find(row[None], count).ids
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def nucleus(row: Row, share: float) -> TokenIds:
    """The fewest tokens whose probabilities add up to this share, unordered."""
    best = row.max()
    if not isfinite(best):
        return np.zeros(0, np.intp)
    target = share * total_weight(row, best)
    ids = top_tokens(row, _NUCLEUS)
    sums = np.exp(row[ids].astype(np.float64) - best).cumsum()
    if sums[-1] < target:
        gaps = best - row
        weights = np.exp(-gaps)
        return np.flatnonzero(weights >= _nucleus_bound(gaps, weights, target))
    return ids[: int(sums.searchsorted(target)) + 1]


def total_weight(row: Row, best: np.float32) -> float:
    """By parts, because new memory of the size of a row takes as long as the work."""
    total = 0.0
    for start in range(0, len(row), _PART):
        part = row[start : start + _PART] - best
        total += float(np.exp(part, out=part).sum())
    return total


def _nucleus_bound(gaps: Row, weights: Row, target: float) -> np.float32:
    """The smallest of the largest weights that add up to the target. Sorting all takes ten times as long: a histogram
    finds the bin of the bound, and only that bin is sorted."""
    bins = np.minimum(gaps * _BINS_PER_NAT, _BINS - 1).astype(np.intp)
    sums = np.bincount(bins, weights, _BINS).cumsum()
    target = min(target, float(sums[-1]))  # it was summed in another order
    at = int(sums.searchsorted(target))
    falling = np.sort(weights[bins == at])[::-1]
    before = sums[at - 1] if at else 0.0
    place = int(falling.cumsum(dtype=np.float64).searchsorted(target - before))
    bound: np.float32 = falling[min(place, len(falling) - 1)]
    return bound


def _draw(sums: Floats, random: float) -> int:
    """Never a token with probability 0: it adds nothing to the sums."""
    return min(int(sums.searchsorted(random * sums[-1], "right")), len(sums) - 1)


@lru_cache(64)
def _block_starts(count: int) -> Any:
    return np.arange(0, count, _BLOCK)
