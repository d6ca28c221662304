"""Chooses tokens: `Sampler` for one job, `BatchSampler` for all jobs of a step in one pass over the logits.

On a GPU each microsecond here is one for which it waits. So no weight of the whole vocabulary is computed:

    temperature 0         the best logit
    top_k                 numpy finds the top tokens, llama.cpp's samplers draw one of them
    no top_k, no seed     rejection: top tokens are proposed by their weight, the others by an upper bound of it;
                          min_p and top_p then accept the token or not
    no top_k, a seed      numpy on the row alone: truncation leaves some dozens of tokens, and without it the draw goes
                          by sums of blocks. For 49,152 tokens 0.03 to 0.1 ms instead of up to 4 ms
    anything else         llama.cpp's chain on the whole row, alone (`sampler_chain.py`)

The order is llama.cpp's: top_p, min_p, temperature.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, isfinite, log, nextafter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from numpy.random import MT19937, RandomState

from modelyard.core.request import Sampling
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.llama_cpp.binding import short
from modelyard.engines.llama_cpp.logit_columns import (
    GROUP,
    LINES,
    Columns,
    ColumnSearch,
    Row,
    Rows,
    TokenIds,
    TopTokens,
    columns_of,
    for_rows,
)
from modelyard.engines.llama_cpp.logits import LogitProcessor, logit_processor, logits_row
from modelyard.engines.llama_cpp.sampler_chain import (
    MIN_TEMPERATURE,
    DrySamplers,
    is_greedy,
    is_supported_by_numpy,
    top_k_chain,
    whole_chain,
    with_named_samplers,
)

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_BLOCK = 256  # tokens whose probabilities are summed before one of them is drawn
_NUCLEUS = 256  # a top_p rarely keeps more tokens
_PART = 16_384  # tokens whose weights are summed at once
_BINS, _BINS_PER_NAT = 256, 8
_BELOW_ONE = nextafter(1.0, 0.0)
_OPEN_TOKENS = 24  # searched for a job without top_k: of a trained model they have most of the probability
_NUCLEUS_TOKENS = 40  # with a top_p: more of them are accepted without the weights of the whole row
_ROUNDS = 32, 256  # proposals of each row
_LOG_GROUP = log(LINES * GROUP)
_TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
# llama_token_data_array
_LIST = np.dtype(
    {
        "names": ["data", "size", "selected", "sorted"],
        "formats": [np.uint64, np.uint64, np.int64, np.bool_],
        "offsets": [0, 8, 16, 24],
        "itemsize": 32,
    }
)


class Sampler:
    """Samples the tokens of one job. `prompt` are its first tokens: penalties and DRY look back into it, as in
    llama-server."""

    def __init__(self, sampling: Sampling, dry: DrySamplers, n_vocab: int, window: int, prompt: Any = ()) -> None:
        s = with_named_samplers(sampling)
        if s.top_k is not None and s.top_k > n_vocab:  # memory is reserved for so many
            s = replace(s, top_k=n_vocab)
        seed = (s.seed if s.seed is not None else secrets.randbits(32)) & 0xFFFFFFFF
        self.kind = _kind(s)
        self.is_seeded, self.top_k = s.seed is not None, s.top_k or 0
        self.temperature = 1.0 if s.temperature is None else max(s.temperature, MIN_TEMPERATURE)
        self.top_p = 1.0 if s.top_p is None else s.top_p
        self.min_gap = log(s.min_p) if s.min_p else -inf  # how far below the best logit others may be
        self.chain: int | None = None
        if self.kind == "top_k":
            self.chain = top_k_chain(s, seed)
        elif self.kind == "chain":
            self.chain = whole_chain(s, dry, n_vocab, window, seed, prompt)
        self._random = uniform_numbers(seed) if self.kind == "open" else None
        self._n_vocab = n_vocab
        self._processor = logit_processor(s, n_vocab, prompt)
        self._alone: BatchSampler | None = None  # of this job, once it is needed

    @property
    def is_greedy(self) -> bool:
        """It takes the best token, of logits that `processor` has changed."""
        return self.kind == "greedy"

    @property
    def is_batched(self) -> bool:
        """It may sample together with those of other jobs, after `processor` has changed the logits."""
        return self.kind != "chain"

    @property
    def processor(self) -> LogitProcessor | None:
        """What changes the logits before; llama.cpp's chain does that itself."""
        return None if self.kind == "chain" else self._processor

    @property
    def lone_temperature(self) -> float | None:
        """The temperature, if the request sets nothing else, not even a seed."""
        is_lone = self.kind == "open" and self._processor is None and not self.is_seeded and not self.truncates
        return self.temperature if is_lone else None

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.min_gap > -inf

    def logits(self, context: Any, row: int) -> Row:
        return logits_row(context, row, self._n_vocab)

    def sample(self, context: Any, row: int, logits: Row | None = None) -> int:
        """The token after that row of the last decode; penalties count it from now on. `logits`: its row, if known."""
        if self.kind == "chain":
            token: int = short.sampler_sample(self.chain, context, row)
            return token
        if logits is None:
            logits = logits_row(context, row, self._n_vocab)
        return self._choose(logits) if self._processor is None else self._processor.sample(logits, self._choose)

    def _choose(self, logits: Row) -> int:
        if self.kind == "greedy":
            return int(logits.argmax())
        if self._alone is None:
            self._alone = BatchSampler([self])
        return self._alone.sample(logits[None])[0]

    def close(self) -> None:
        chain, self.chain = self.chain, None
        if chain is not None:
            short.sampler_free(chain)

    def sample_row(self, row: Row) -> int:
        """With numpy: of a seeded job, or where a batch finds no token. If the logits are not finite, any token."""
        token = None
        if self._random is not None:
            token = self._sample_truncated(row, self._random) if self.truncates else self._sample_all(row, self._random)
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

    def distribution(self, row: Row) -> tuple[TokenIds, Floats]:
        """The tokens that are left for the next draw, and their probabilities, as llama.cpp's samplers leave them."""
        if self._processor is not None:
            row = self._processor.applied(row)
        if self.kind == "greedy":
            return np.array([row.argmax()], np.intp), np.ones(1)
        if self.top_k:
            ids = top_tokens(row, self.top_k)
            row, kept = np.full_like(row, -inf), row[ids]
            row[ids] = kept
        if self.truncates:
            ids, gaps = self.truncate(row)
        else:
            ids = np.flatnonzero(np.isfinite(row))
            gaps = row[ids].astype(np.float64) - row[ids].max(initial=-inf)
        weights = np.exp(gaps / self.temperature)
        return ids, weights / weights.sum()

    def reported(self, row: Row, top: int) -> Callable[[int], IdLogprob]:
        """What is told of the token that is drawn from this row, which may change meanwhile: its probability, and the
        most likely of those that were left."""
        ids, shares = self.distribution(row)
        most = min(top, len(ids))
        order: list[int] = np.argpartition(-shares, most - 1)[:most].tolist() if most else []
        best = tuple((int(ids[at]), log(shares[at])) for at in sorted(order, key=lambda at: -shares[at]) if shares[at])

        def report(token: int) -> IdLogprob:
            share = float(shares[ids == token].sum())
            return IdLogprob(token, log(share) if share else -inf, best)

        return report

    def _sample_truncated(self, row: Row, random: Callable[[], float]) -> int | None:
        ids, gaps = self.truncate(row)
        sums = np.exp(gaps / self.temperature).cumsum()
        return int(ids[_draw(sums, random())]) if len(sums) else None

    def _sample_all(self, row: Row, random: Callable[[], float]) -> int | None:
        """Draws a block by its sum, then a token of the block with the rest of the same random number."""
        best = row.max()
        if not isfinite(best):
            return None
        weights = row - best
        weights /= np.float32(self.temperature)
        np.exp(weights, out=weights)
        starts = _block_starts(len(row))
        sums = np.add.reduceat(weights, starts).astype(np.float64).cumsum()
        target = random() * sums[-1]
        block = min(int(sums.searchsorted(target, "right")), len(sums) - 1)
        before = sums[block - 1] if block else 0.0
        inner = weights[starts[block] : starts[block] + _BLOCK].cumsum(dtype=np.float64)
        return int(starts[block]) + _draw(inner, (target - before) / (sums[block] - before))


def _kind(s: Sampling) -> Literal["greedy", "top_k", "open", "chain"]:
    """What chooses the token: argmax, llama.cpp's chain on the top tokens, numpy, or llama.cpp's chain on all."""
    if s.dry_multiplier or not (is_greedy(s) or is_supported_by_numpy(s)):
        return "chain"
    if is_greedy(s):
        return "greedy"
    return "top_k" if s.top_k and s.top_k > 0 else "open"


def uniform_numbers(seed: int) -> Callable[[], float]:
    """The numbers that llama.cpp draws with this seed: C++'s `mt19937` and `uniform_real_distribution<double>`. So a
    request with a seed gets the tokens that it would get there."""
    generator = MT19937(0)
    state: Any = RandomState(seed).get_state(legacy=False)
    generator.state = state
    draw = generator.random_raw

    def number() -> float:
        low, high = draw(2).tolist()
        return float(min((low + high * 2.0**32) / 2.0**64, _BELOW_ONE))

    return number


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


def share_above(row: Row, best: np.float32, logit: np.float32) -> float:
    """The probability of the tokens above this logit, by the weights of all tokens. Where a weight counts is not
    decided for each alone: all but those above are raised to the limit, and that is taken off again."""
    total = above = 0.0
    limit = np.exp(logit - best)
    for start in range(0, len(row), _PART):
        weights = row[start : start + _PART] - best
        total += float(np.exp(weights, out=weights).sum())
        below = len(weights) - np.count_nonzero(weights > limit)
        above += float(np.maximum(weights, limit, out=weights).sum()) - below * float(limit)
    return above / total


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


class BatchSampler:
    """Samples the jobs of a step. A job with a top_k or a seed gets the token that it would get alone.

    Jobs with neither draw from the whole vocabulary by rejection. A top token is proposed by its weight. Another token
    is proposed as if all tokens of its group had the weight of the group's maximum, and accepted with the part of that
    weight that it has. So no weight but those of the top tokens and of the maxima is needed.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers, self._search = samplers, ColumnSearch()
        self._limited = [at for at, each in enumerate(samplers) if each.kind == "top_k"]
        self._open = [at for at, each in enumerate(samplers) if each.kind == "open" and not each.is_seeded]
        searched = [_NUCLEUS_TOKENS if samplers[at].top_p < 1 else _OPEN_TOKENS for at in self._open]
        self._count = max((0, *searched, *(samplers[at].top_k for at in self._limited)))
        self._limited_lines, self._open_lines = np.array(self._limited, np.intp), np.array(self._open, np.intp)
        self._lists = np.zeros(len(self._limited), _LIST)
        self._addresses = [self._lists.ctypes.data + at * _LIST.itemsize for at in range(len(self._limited))]
        self._resize(64 if self._limited else 0)
        self._scale = np.ones((len(samplers), 1))
        self._scale[self._open_lines, 0] = [1 / samplers[at].temperature for at in self._open]
        self._min_gap = np.array([each.min_gap for each in samplers], np.float32)
        self._top_p = np.array([each.top_p for each in samplers])
        self._has_min_p = any(samplers[at].min_gap > -inf for at in self._open)
        self._has_top_p = any(samplers[at].top_p < 1 for at in self._open)
        self._random = np.random.default_rng() if self._open else None
        self._layout: Columns | None = None
        self._next: Numbers | None = None

    def sample(self, rows: Rows) -> list[int]:
        tokens = [-1] * len(rows)
        if self._count:
            top = self._search.find(rows, self._count)
            if self._limited:
                self._draw_limited(top, tokens)
            if self._random is not None and top.groups is not None:
                self._draw_open(self._random, rows, top, top.groups, tokens)
        for at, token in enumerate(tokens):
            if token < 0:
                tokens[at] = self._samplers[at].sample_row(rows[at])
        return tokens

    def prepare(self) -> None:
        """What the next step needs; call it while a GPU computes."""
        if self._random is not None and self._next is None and self._layout is not None:
            lines = self._open_lines
            self._next = Numbers(self._random, self._layout, lines, self._scale[lines], _ROUNDS[0])

    # --- jobs with a top_k --------------------------------------------------------------------------------------------

    def _resize(self, count: int) -> None:
        self._tokens = np.zeros(count, _TOKEN)
        self._ids, self._logits = self._tokens["id"], self._tokens["logit"]

    def _draw_limited(self, top: TopTokens, tokens: list[int]) -> None:
        """Adds the tokens of these jobs, unless a row has none or its logits are not finite."""
        count = len(top.ids)
        if count > len(self._tokens):
            self._resize(2 * count)
        self._ids[:count], self._logits[:count] = top.ids, top.logits
        starts = top.borders[self._limited_lines]
        lists = self._lists
        lists["data"] = starts * _TOKEN.itemsize + self._tokens.ctypes.data
        lists["size"] = sizes = top.borders[self._limited_lines + 1] - starts
        lists["selected"], lists["sorted"] = -1, False
        usable = self._usable(top, sizes.tolist())
        for at, address, is_usable in zip(self._limited, self._addresses, usable, strict=True):
            if is_usable and (chain := self._samplers[at].chain) is not None:
                short.sampler_apply(chain, address)
        drawn = self._ids[starts + lists["selected"]].tolist()
        for at, token, is_usable in zip(self._limited, drawn, usable, strict=True):
            if is_usable:
                tokens[at] = token

    def _usable(self, top: TopTokens, sizes: list[int]) -> list[bool]:
        if all(sizes) and isfinite(float(np.add.reduce(top.logits))):
            return [True] * len(sizes)
        borders = top.borders.tolist()
        return [
            size > 0 and bool(np.isfinite(top.logits[borders[at] : borders[at + 1]]).all())
            for at, size in zip(self._limited, sizes, strict=True)
        ]

    # --- jobs with neither a top_k nor a seed -------------------------------------------------------------------------

    def _draw_open(
        self, random: np.random.Generator, rows: Rows, top: TopTokens, groups: Rows, tokens: list[int]
    ) -> None:
        """Adds the tokens of these jobs, unless no proposal is accepted."""
        best = np.maximum.reduce(groups, axis=1)
        sizes = (top.borders[1:] - top.borders[:-1]).tolist()
        if not all(sizes) or not isfinite(sum(best.tolist())):
            return
        self._layout = columns_of(rows.shape[1])
        self.prepare()
        numbers, self._next = self._next, None
        boxes = Boxes(rows, top, max(sizes), groups, best, self._scale)
        waiting = self._open
        for count in _ROUNDS:
            if numbers is None:
                numbers = Numbers(random, self._layout, np.array(waiting), self._scale[waiting], count)
            self._draw_round(boxes, numbers, tokens)
            waiting, numbers = [at for at in waiting if tokens[at] < 0], None
            if not waiting:
                return

    def _draw_round(self, boxes: Boxes, numbers: Numbers, tokens: list[int]) -> None:
        drawn, accepted = boxes.draw(numbers)
        if self._has_min_p:
            lowest = boxes.best + self._min_gap
            accepted &= boxes.logits(numbers, drawn) >= lowest[numbers.lines][:, None]
        first = accepted.argmax(1) + numbers.firsts
        is_accepted, found = accepted.take(first), boxes.tokens(numbers, drawn, first)
        if self._has_top_p:
            self._keep_nucleus(boxes, numbers.lines, np.array(found), is_accepted)
        for at, token, is_one in zip(numbers.lines.tolist(), found, is_accepted.tolist(), strict=True):
            if is_one:
                tokens[at] = token

    def _keep_nucleus(self, boxes: Boxes, lines: TokenIds, found: TokenIds, is_accepted: Flags) -> None:
        """A token is accepted if the tokens above it have less than top_p of all weights. The weights of the top tokens
        are nearly all, and enough to accept most tokens. Otherwise all weights of the row are computed."""
        logits = boxes.rows[lines, found]
        above, least = boxes.weights_above(lines, logits)
        is_inside = above < self._top_p[lines] * least
        is_inside &= logits >= boxes.top.bounds[lines]
        unknown = (is_accepted > is_inside).nonzero()[0]

        def decide(part: slice) -> None:
            for at in unknown[part].tolist():
                line, share = lines[at], self._top_p[lines[at]]
                is_accepted[at] = share >= 1 or share_above(boxes.rows[line], boxes.best[line], logits[at]) < share

        # Such a row takes as long as a pass over several.
        for_rows(len(unknown), 8 * len(unknown) * boxes.rows.shape[1], decide)


class Numbers:
    """Random numbers for proposals of some rows."""

    def __init__(
        self, random: np.random.Generator, layout: Columns, lines: TokenIds, scale: Floats, count: int
    ) -> None:
        self.lines, self.firsts = lines, np.arange(len(lines)) * count
        self.box, part, place = random.random((3, len(lines), count))
        self.box *= 1 - 1e-12  # sums are rounded
        self.part = np.log(part) / scale  # how far below its upper bound a logit may be
        line, column = np.divmod((place * (LINES * GROUP)).astype(np.intp), GROUP)
        self.column = column * layout.groups  # of a group, to which the group is added
        self.place = self.column + layout.offsets[line] + lines[:, None] * layout.vocab  # in all logits, likewise
        self.is_last = line == LINES - 1


class Boxes:
    """What is drawn by its weight: each top token of a row, and all other tokens of each of its groups together."""

    def __init__(self, rows: Rows, top: TopTokens, tops: int, groups: Rows, best: Row, scale: Floats) -> None:
        n_rows, starts = len(rows), top.borders[:-1]
        self.rows, self.top, self.best = rows, top, best
        self._layout = columns_of(rows.shape[1])
        self._tops = tops  # places for top tokens; most rows fill them
        count = self._tops + self._layout.groups
        firsts = np.arange(0, n_rows * count, count)
        self._group_firsts = firsts + self._tops
        self._caps = np.minimum(groups, top.bounds[:, None])
        weights = np.empty((n_rows, count))
        weights[:, : self._tops] = -inf
        weights.ravel()[np.arange(len(top.lines)) + (firsts - starts)[top.lines]] = top.logits
        np.add(self._caps, _LOG_GROUP / scale, out=weights[:, self._tops :])
        weights -= best[:, None]
        weights *= scale
        np.exp(weights, out=weights)
        self._sums = weights.ravel().cumsum()
        ends = self._sums[count - 1 :: count]
        self._before = np.zeros(n_rows)
        self._before[1:] = ends[:-1]
        self._totals = ends - self._before

    def draw(self, numbers: Numbers) -> tuple[TokenIds, Flags]:
        """Boxes of each row in the order in which they are tried, counted from the first group, and whether they give a
        token."""
        lines = numbers.lines
        targets = numbers.box * self._totals[lines][:, None]
        targets += self._before[lines][:, None]
        drawn = self._sums.searchsorted(targets, "right")
        drawn -= self._group_firsts[lines][:, None]
        accepted = drawn < 0
        if max(drawn[:, 0].tolist()) < 0:  # the first are top tokens
            return drawn, accepted
        groups = np.maximum(drawn, 0)
        values = self.rows.ravel().take(numbers.place + groups)
        gaps = values - self._caps.ravel().take(groups + (lines * self._layout.groups)[:, None])
        is_other = gaps > numbers.part
        is_other &= values < self.top.bounds[lines][:, None]
        if self._layout.short:
            is_other &= ~numbers.is_last | (numbers.column + groups >= self._layout.short)
        accepted |= is_other
        return drawn, accepted

    def tokens(self, numbers: Numbers, drawn: TokenIds, at: TokenIds) -> list[int]:
        """Of one proposal of each row."""
        vocab, ids, starts = self._layout.vocab, self.top.ids, (self.top.borders + self._tops).tolist()
        found = zip(numbers.lines.tolist(), drawn.take(at).tolist(), numbers.place.take(at).tolist(), strict=True)
        return [ids.item(starts[line] + box) if box < 0 else place + box - line * vocab for line, box, place in found]

    def logits(self, numbers: Numbers, drawn: TokenIds) -> Row:
        """Of all proposals."""
        starts = self.top.borders[numbers.lines] + self._tops
        tops = self.top.logits.take(np.minimum(drawn, -1) + starts[:, None], mode="clip")
        others = self.rows.ravel().take(numbers.place + np.maximum(drawn, 0))
        found: Row = np.where(drawn < 0, tops, others)
        return found

    def weights_above(self, lines: TokenIds, logits: Row) -> tuple[Row, Row]:
        """The weight of the top tokens above these, and of all of them. The temperature is 1: it follows truncation."""
        top, starts, limits = self.top, self.top.borders[:-1], logits
        if len(lines) < len(self.rows):
            limits = np.zeros(len(self.rows), np.float32)
            limits[lines] = logits
        weights = np.exp(top.logits - self.best[top.lines])
        least = np.add.reduceat(weights, starts)
        weights *= top.logits > limits[top.lines]
        return np.add.reduceat(weights, starts)[lines], least[lines]
