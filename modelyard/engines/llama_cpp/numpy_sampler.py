"""Samples tokens with numpy: temperature, top_k, top_p and min_p, which is all that most requests use. Pure.

llama.cpp's samplers build a list of the whole vocabulary for each token, and some sort it. Here numpy works on the row
of logits in place: truncation leaves some dozens of tokens, and without truncation the draw goes by sums of blocks. For
49,152 tokens that takes 0.03 to 0.1 ms instead of up to 4 ms. The order is llama.cpp's: top_k, top_p, min_p,
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp, inf, isfinite, log, nextafter
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from numpy.random import MT19937

from modelyard.core.request import Sampling

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

_BLOCK = 256  # tokens whose probabilities are summed before one of them is drawn
_LINES, _COLUMNS = 8, 512  # of a row that is searched
_SPAN = 4096  # columns whose maxima fit into a core's first cache
_LOWEST = np.finfo(np.float32).min
_NUCLEUS = 256  # a top_p rarely keeps more tokens
_NUCLEUS_OF_BATCH = 64  # nor often more than these; the search takes longer for more
_PART = 16_384  # tokens whose weights are summed at once
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
        self._draw_number = uniform_numbers(seed)
        self._next_number: float | None = None
        self.is_seeded = sampling.seed is not None
        self.temperature = 1.0 if sampling.temperature is None else max(sampling.temperature, _MIN_TEMPERATURE)
        self.top_k = max(0, sampling.top_k or 0)
        self.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_gap = log(sampling.min_p) if sampling.min_p else -inf  # how far below the best logit others may be

    def random(self) -> float:
        number, self._next_number = self._next_number, None
        return self._draw_number() if number is None else number

    def prepare(self) -> None:
        """Draws the next number ahead, while a GPU computes."""
        if self._next_number is None:
            self._next_number = self._draw_number()

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
    return top_of_rows(row[None], count).ids


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


class TopTokens(Struct, frozen=True):
    """Of several rows: the row, the token and the logit of each, in the order of the rows."""

    lines: TokenIds
    ids: TokenIds
    logits: Row
    maxima: Row | None = None  # of the columns of each row, if they were searched


def column_maxima(rows: npt.NDArray[np.float32], out: Row | None = None) -> Row:
    """Of each row, laid out in `_LINES` lines; without the few tokens that do not fill a column. New memory costs as
    much as the search, so `out` may be that of the last step."""
    width = rows.shape[1] // _LINES
    grid = rows[:, : _LINES * width].reshape(len(rows), _LINES, width)
    maxima: Row = np.empty((len(rows), width), np.float32) if out is None else out
    for start in range(0, width, _SPAN):
        np.maximum.reduce(grid[:, :, start : start + _SPAN], axis=1, out=maxima[:, start : start + _SPAN])
    return maxima


def top_of_rows(rows: npt.NDArray[np.float32], count: int, out: Row | None = None) -> TopTokens:
    """Of each row the `count` most likely tokens and a few more.

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
        return TopTokens(lines, ids, rows[lines, ids])
    maxima = column_maxima(rows, out)
    inner = width // height
    highest = maxima[:, : height * inner].reshape(n_rows, height, inner).max(1)
    bounds = np.partition(highest, inner - count, axis=1)[:, inner - count]
    bounds = np.maximum(bounds, _LOWEST)[:, None]  # impossible tokens never count
    owners, columns = np.divmod(np.flatnonzero(maxima >= bounds), width)
    starts = (owners * vocab + columns)[:, None] + np.arange(0, _LINES * width, width)
    searched = rows.ravel().take(starts)
    at = np.flatnonzero(searched >= bounds[owners])
    column = at // _LINES
    lines, logits = owners[column], searched.ravel()[at]
    ids = starts.ravel()[at] - lines * vocab
    if vocab > _LINES * width:
        rest = rows[:, _LINES * width :]
        more, places = np.nonzero(rest >= bounds)
        order = np.argsort(np.concatenate((lines, more)), kind="stable")
        lines = np.concatenate((lines, more))[order]
        ids = np.concatenate((ids, places + _LINES * width))[order]
        logits = np.concatenate((logits, rest[more, places]))[order]
    return TopTokens(lines, ids, logits, maxima)


_PROPOSALS = 16  # of each row: at least an eighth of them is accepted on average
_MIN_OPEN_VOCAB = 4096  # below it the work on a whole row takes no longer


class BatchSampler:
    """The samplers of several jobs at once: numpy takes longer to be called than for the work on a few dozen tokens.

    A job with a top_k or top_p gets the token that it would get alone. So does one with a seed. A job with none of them
    draws from the whole vocabulary by rejection, without the weight of each token: a column is proposed by the weight
    of its maximum, a token of the column at random, and it is accepted with the part of that weight that it has. The
    other jobs sample alone.
    """

    def __init__(self, samplers: Sequence[NumpySampler]) -> None:
        self._samplers = samplers
        self._open = [at for at, each in enumerate(samplers) if not each.truncates and not each.is_seeded]
        self._nuclei = [at for at, each in enumerate(samplers) if not each.top_k and each.top_p < 1]
        limits = [each.top_k or (_NUCLEUS_OF_BATCH if each.top_p < 1 else 0) for each in samplers]
        self._is_limited = np.array(limits) > 0
        self._max_k = max(limits)
        self._columns, self._lines = np.arange(self._max_k), np.arange(len(samplers))
        self._top_k = _column([limit or self._max_k for limit in limits])
        self._top_p = _column([each.top_p for each in samplers])
        self._min_gap = _column([each.min_gap for each in samplers])
        self._temperature = _column([each.temperature for each in samplers])
        self._random = np.random.default_rng() if self._open else None
        self._limits_vary = len(set(limits)) > 1
        limited = [each for each, limit in zip(samplers, limits, strict=True) if limit]
        self._has_top_p = any(each.top_p < 1 for each in limited)
        self._has_min_p = any(each.min_gap > -inf for each in limited)
        self._drawing = limited
        self._maxima: Row | None = None

    @property
    def is_useful(self) -> bool:
        return len(self._samplers) > 1 and bool(self._drawing or self._open)

    def sample(self, rows: npt.NDArray[np.float32]) -> list[int]:
        tokens, found = [-1] * len(rows), None
        if self._max_k:
            top = top_of_rows(rows, self._max_k, self._maxima)
            tokens, found = self._draw_limited(rows, top), top.maxima
        if self._random is not None:
            found = column_maxima(rows, self._maxima) if found is None else found
            self._draw_open(rows, found, tokens, self._random)
        self._maxima = found
        for at, token in enumerate(tokens):
            if token < 0:
                tokens[at] = self._samplers[at].sample(rows[at])
        return tokens

    def prepare(self) -> None:
        """What the next step needs; call it while a GPU computes."""
        for each in self._drawing:
            each.prepare()

    def _draw_limited(self, rows: npt.NDArray[np.float32], top: TopTokens) -> list[int]:
        """-1 for jobs that are not limited, for a nucleus with more tokens than were searched, and for all of them if a
        row has too few tokens."""
        n_rows = len(rows)
        counts = np.bincount(top.lines, minlength=n_rows)
        if counts.min() < self._max_k:  # fewer tokens exist or are possible
            return [-1] * n_rows
        falling = np.argsort(-top.logits, kind="stable")
        falling = falling[np.argsort(top.lines[falling].astype(np.int16), kind="stable")]
        places = falling[(counts.cumsum() - counts)[:, None] + self._columns]
        logits = top.logits[places].astype(np.float64)
        if not np.isfinite(logits[:, 0]).all():
            return [-1] * n_rows
        gaps = logits - logits[:, :1]
        tempered, is_drawn = np.exp(gaps / self._temperature), self._is_limited
        if self._limits_vary or self._has_top_p or self._has_min_p:
            kept, is_drawn = self._truncate(rows, gaps)
            tempered *= kept
        sums = tempered.cumsum(1)
        numbers = [each.random() if drawn else 0.0 for each, drawn in zip(self._samplers, is_drawn, strict=True)]
        columns = np.minimum((sums <= _column(numbers) * sums[:, -1:]).sum(1), (tempered > 0).sum(1) - 1)
        tokens: list[int] = np.where(is_drawn, top.ids[places[self._lines, columns]], -1).tolist()
        return tokens

    def _truncate(self, rows: npt.NDArray[np.float32], gaps: Floats) -> tuple[npt.NDArray[np.bool_], Any]:
        """The tokens that truncation leaves, in each line from the first on, and whether these are all of them."""
        kept, is_whole = self._columns < self._top_k, self._is_limited
        if self._has_top_p:
            weights = np.exp(gaps) * kept
            sums = weights.cumsum(1)
            targets = self._top_p * sums[:, -1:]
            if self._nuclei:
                is_whole = is_whole.copy()
                for at in self._nuclei:
                    target = self._samplers[at].top_p * total_weight(rows[at], rows[at].max())
                    targets[at], is_whole[at] = target, sums[at, -1] >= target
            kept &= sums - weights < targets
        if self._has_min_p:
            kept &= gaps >= self._min_gap
        kept[:, 0] = True  # as without any truncation
        return kept, is_whole

    def _draw_open(
        self, rows: npt.NDArray[np.float32], maxima: Row, tokens: list[int], random: np.random.Generator
    ) -> None:
        """Adds the tokens of the jobs that do not limit theirs, unless no proposal is accepted."""
        vocab, width = rows.shape[1], maxima.shape[1]
        if vocab != _LINES * width or vocab < _MIN_OPEN_VOCAB:
            return
        lines = random.integers(0, _LINES, (len(rows), _PROPOSALS))
        numbers = random.random((2, len(rows), _PROPOSALS))
        starts = _block_starts(width)
        for at in self._open:
            best, temperature = maxima[at].max(), np.float32(self._samplers[at].temperature)
            if not isfinite(best):
                continue
            weights = np.exp((maxima[at] - best) / temperature)
            sums = np.add.reduceat(weights, starts).astype(np.float64).cumsum()
            targets = numbers[0, at] * sums[-1]
            blocks = np.minimum(sums.searchsorted(targets, "right"), len(sums) - 1)
            for block, target, line, number in zip(
                blocks.tolist(), targets.tolist(), lines[at].tolist(), numbers[1, at].tolist(), strict=True
            ):
                inner = weights[starts[block] : starts[block] + _BLOCK].cumsum(dtype=np.float64)
                before = float(sums[block - 1]) if block else 0.0
                column = int(starts[block]) + min(int(inner.searchsorted(target - before, "right")), len(inner) - 1)
                token = line * width + column
                if number < exp(float(rows[at, token] - maxima[at, column]) / float(temperature)):
                    tokens[at] = token
                    break


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, np.float64)[:, None]
