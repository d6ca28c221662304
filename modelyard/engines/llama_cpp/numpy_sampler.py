"""Samples tokens with numpy: temperature, top_k, top_p and min_p, which is all that most requests use. Pure.

llama.cpp's samplers build a list of the whole vocabulary for each token, and some sort it. Here numpy works on the row
of logits in place: truncation leaves some dozens of tokens, and without truncation the draw goes by sums of blocks. For
49,152 tokens that takes 0.03 to 0.1 ms instead of up to 4 ms. The order is llama.cpp's: top_k, top_p, min_p,
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, isfinite, log, nextafter
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import MT19937

from modelyard.core.request import Sampling

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

_BLOCK = 256  # tokens whose probabilities are summed before one of them is drawn
_LINES, _COLUMNS = 8, 512  # of a row that is searched
_LOWEST = np.finfo(np.float32).min
_NUCLEUS = 256  # a top_p rarely keeps more tokens
_BINS, _BINS_PER_NAT = 256, 8
_BELOW_ONE = nextafter(1.0, 0.0)
_MIN_TEMPERATURE = 1e-6  # below it only overflows change


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
        self.temperature = 1.0 if sampling.temperature is None else max(sampling.temperature, _MIN_TEMPERATURE)
        self.top_k = max(0, sampling.top_k or 0)
        self.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_gap = log(sampling.min_p) if sampling.min_p else -inf  # how far below the best logit others may be

    @property
    def truncates(self) -> bool:
        return bool(self.top_k) or self.top_p < 1 or self.min_gap > -inf

    def sample(self, row: Row) -> int:
        """If the logits are not finite, any token."""
        token = self._sample_truncated(row) if self.truncates else self._sample_all(row)
        return int(row.argmax()) if token is None else token

    def truncate(self, row: Row) -> tuple[TokenIds, Floats]:
        """The tokens that are left, and the gap of each to the best logit: 0 or negative."""
        if self.top_k:
            ids = top_tokens(row, self.top_k)
        elif self.top_p < 1:
            ids = nucleus(row, self.top_p)
        else:
            ids = np.flatnonzero(row >= row.max() + np.float32(self.min_gap))
        gaps = row[ids].astype(np.float64)
        best = gaps.max(initial=-inf)
        if not isfinite(best):
            return ids[:0], gaps[:0]
        gaps -= best
        if self.top_k and self.top_p < 1:
            sums = np.exp(gaps).cumsum()
            count = int(sums.searchsorted(self.top_p * sums[-1])) + 1
            ids, gaps = ids[:count], gaps[:count]
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
    ids = top_candidates(row, count)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def top_candidates(row: Row, count: int) -> TokenIds:
    """The `count` most likely tokens and a few more, unordered; fewer if no others are possible."""
    return top_of_rows(row[None], count)[1]


def nucleus(row: Row, share: float) -> TokenIds:
    """The fewest tokens whose probabilities add up to this share, unordered."""
    best = row.max()
    if not isfinite(best):
        return np.zeros(0, np.intp)
    gaps = best - row
    weights = np.exp(-gaps)
    target = share * float(weights.sum())
    ids = top_tokens(row, _NUCLEUS)
    sums = weights[ids].cumsum(dtype=np.float64)
    if sums[-1] < target:
        return np.flatnonzero(weights >= _nucleus_bound(gaps, weights, target))
    return ids[: int(sums.searchsorted(target)) + 1]


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


def top_of_rows(rows: npt.NDArray[np.float32], count: int) -> tuple[TokenIds, TokenIds, Row]:
    """Of each row the `count` most likely tokens and a few more, unordered: row, token and logit of each.

    A row is laid out in `_LINES` lines, and the maxima of its columns in lines again. At least `count` tokens reach the
    count-th highest maximum of those columns. Hardly more do: likely tokens are often neighbours, and neighbours are in
    different columns. Then only the columns whose maximum reaches that bound are searched. Each of their tokens is in
    another cache line, which is why the columns are short: of 62 lines the search took as long as everything else.
    Threads for parts of the rows made it slower on a machine with 16 cores: waking them takes longer than the search.
    """
    n_rows, vocab = rows.shape
    count = min(count, vocab)
    width = vocab // _LINES
    inner = max(_COLUMNS, 4 * count)
    height = width // inner
    if height < 1:
        ids = np.argpartition(rows, vocab - count, axis=1)[:, vocab - count :].ravel()
        lines = np.repeat(np.arange(n_rows), count)
        return lines, ids, rows[lines, ids]
    grid = rows[:, : _LINES * width].reshape(n_rows, _LINES, width)
    maxima = grid.max(1)
    inner = width // height
    highest = maxima[:, : height * inner].reshape(n_rows, height, inner).max(1)
    bounds = np.partition(highest, inner - count, axis=1)[:, inner - count]
    bounds = np.maximum(bounds, _LOWEST)[:, None]  # impossible tokens never count
    owners, columns = np.divmod(np.flatnonzero(maxima >= bounds), width)
    searched = grid[owners, :, columns]
    at = np.flatnonzero(searched >= bounds[owners])
    column, line = at // _LINES, at % _LINES
    found = owners[column], line * width + columns[column], searched.ravel()[at]
    if vocab == _LINES * width:
        return found
    rest = rows[:, _LINES * width :]
    lines, ids = np.nonzero(rest >= bounds)
    joined = zip(found, (lines, ids + _LINES * width, rest[lines, ids]), strict=True)
    return tuple(np.concatenate(parts) for parts in joined)  # type: ignore[return-value]


class BatchSampler:
    """The samplers of several jobs at once; each gets the token that it would get alone.

    All of them have a top_k, so each looks at a row of the same length. Truncation leaves some dozens of tokens, and
    calling numpy takes longer than the work on them.
    """

    def __init__(self, samplers: Sequence[NumpySampler]) -> None:
        self._samplers = samplers
        self._max_k = max(each.top_k for each in samplers)
        self._columns, self._lines = np.arange(self._max_k), np.arange(len(samplers))
        self._top_k = _column([each.top_k for each in samplers])
        self._top_p = _column([each.top_p for each in samplers])
        self._min_gap = _column([each.min_gap for each in samplers])
        self._temperature = _column([each.temperature for each in samplers])

    def sample(self, rows: npt.NDArray[np.float32]) -> list[int]:
        lines, ids, logits = top_of_rows(rows, self._max_k)
        counts = np.bincount(lines, minlength=len(rows))
        if counts.min() < self._max_k:  # fewer tokens exist or are possible
            return self._sample_each(rows)
        falling = np.lexsort((ids, -logits, lines))
        places = falling[(counts.cumsum() - counts)[:, None] + self._columns]
        sorted_logits = logits[places].astype(np.float64)
        if not np.isfinite(sorted_logits[:, 0]).all():
            return self._sample_each(rows)
        tokens: list[int] = ids[places[self._lines, self._draw(sorted_logits)]].tolist()
        return tokens

    def _sample_each(self, rows: npt.NDArray[np.float32]) -> list[int]:
        return [each.sample(row) for each, row in zip(self._samplers, rows, strict=True)]

    def _draw(self, logits: Floats) -> TokenIds:
        """The column of each line, whose logits fall from left to right."""
        gaps = logits - logits[:, :1]
        weights = np.where(self._columns < self._top_k, np.exp(gaps), 0.0)
        sums = weights.cumsum(1)
        kept = (weights > 0) & (gaps >= self._min_gap) & (sums - weights < self._top_p * sums[:, -1:])
        kept[:, 0] = True  # as without any truncation
        sums = np.where(kept, np.exp(gaps / self._temperature), 0.0).cumsum(1)
        targets = _column([each.random() for each in self._samplers]) * sums[:, -1:]
        drawn: TokenIds = np.minimum((sums <= targets).sum(1), kept.sum(1) - 1)
        return drawn


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, np.float64)[:, None]
