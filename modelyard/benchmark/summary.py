"""What rounds of samples come to: percentiles, rates, errors counted, and the figures that compare two. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Literal

from msgspec import Struct

from modelyard.benchmark.intervals import Interval, Verdict, mean_interval, ratio_interval, together, verdict
from modelyard.benchmark.sample import Round, Sample


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: always a value that was measured."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


class Spread(Struct, frozen=True):
    """One quantity over all answers; nan (null in JSON) where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values) if values else math.nan, *(percentile(values, share) for share in (50, 90, 99)))


class Summary(Struct, frozen=True, kw_only=True):
    """`stream_rate` is tokens a second within a stream after its first, `prompt_rate` the prompt's uncached tokens over
    the time to the first; `tokens_per_s` is all streams' output over the time that rounds took, prompts included.
    Only whole answers count; the others are in `errors`, by what they said.
    """

    streams: int
    rounds: int
    answers: int
    errors: Mapping[str, int]
    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    is_counted: bool
    ttft_s: Spread
    gap_s: Spread
    total_s: Spread
    stream_rate: Spread
    prompt_rate: Spread
    tokens_per_s: Interval
    requests_per_s: Interval


def summarize(rounds: Sequence[Round]) -> Summary:
    good = [sample for one in rounds for sample in one.good]
    return Summary(
        streams=rounds[0].streams if rounds else 0,
        rounds=len(rounds),
        answers=len(good),
        errors=errors(rounds),
        wall_s=sum(one.wall_s for one in rounds),
        prompt_tokens=sum(sample.prompt_tokens for sample in good),
        cached_tokens=sum(sample.cached_tokens for sample in good),
        output_tokens=sum(sample.output_tokens for sample in good),
        is_counted=any(sample.is_counted for sample in good),
        ttft_s=spread([sample.ttft_s for sample in good if sample.ttft_s is not None]),
        gap_s=spread([gap for sample in good for gap in sample.gaps_s]),
        total_s=spread([sample.total_s for sample in good]),
        stream_rate=spread([rate for sample in good if (rate := sample.rate) is not None]),
        prompt_rate=spread([sample.evaluated_tokens / sample.ttft_s for sample in good if sample.ttft_s]),
        tokens_per_s=mean_interval([tokens_per_s(one) for one in rounds]),
        requests_per_s=mean_interval([len(one.good) / one.wall_s for one in rounds if one.wall_s > 0]),
    )


def errors(rounds: Sequence[Round]) -> dict[str, int]:
    said = Counter(sample.error for one in rounds for sample in one.samples if sample.error is not None)
    return dict(said.most_common())


def tokens_per_s(one: Round) -> float:
    return sum(sample.output_tokens for sample in one.good) / one.wall_s if one.wall_s > 0 else math.nan


# --- two subjects in interleaved rounds -------------------------------------------------------------------------------


class Figure(Struct, frozen=True):
    """One number of a round by which subjects are compared; nan where the round has none."""

    name: str
    unit: str
    want: Literal["higher", "lower"]
    of: Callable[[Round], float]


def _mean(what: Callable[[Sample], float | None]) -> Callable[[Round], float]:
    def of(one: Round) -> float:
        values = [value for sample in one.good if (value := what(sample)) is not None]
        return fmean(values) if values else math.nan

    return of


TTFT = Figure("TTFT", "s", "lower", _mean(lambda sample: sample.ttft_s))
GAP = Figure("time a token", "s", "lower", _mean(lambda sample: 1 / rate if (rate := sample.rate) else None))
RATE = Figure("tok/s a stream", "tok/s", "higher", _mean(lambda sample: sample.rate))
THROUGHPUT = Figure("tok/s in all", "tok/s", "higher", tokens_per_s)
TOTAL = Figure("time for an answer", "s", "lower", _mean(lambda sample: sample.total_s))
FIGURES = (TTFT, RATE, THROUGHPUT)


class Compared(Struct, frozen=True, kw_only=True):
    """One figure of two subjects over the same rounds; `ratio` is the first's over the second's."""

    streams: int
    figure: str
    unit: str
    want: Literal["higher", "lower"]
    first: tuple[float, ...]
    second: tuple[float, ...]
    ratio: Interval | None  # None where no round of both has the figure
    verdict: Verdict | Literal["not measured"]


def compare(
    first: Sequence[Round],
    second: Sequence[Round],
    figures: Sequence[Figure] = FIGURES,
    *,
    confidence: float = 0.95,
    lines: int | None = None,
) -> list[Compared]:
    """Round by round. `lines` is how many comparisons are shown in all: the confidence holds for them together."""
    each = together(confidence, lines or len(figures))
    return [_compared(figure, first, second, each) for figure in figures]


def _compared(figure: Figure, first: Sequence[Round], second: Sequence[Round], confidence: float) -> Compared:
    pairs = [(figure.of(a), figure.of(b)) for a, b in zip(first, second, strict=False)]
    pairs = [(a, b) for a, b in pairs if a > 0 and b > 0]  # neither a nan nor a round without an answer
    ours, theirs = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    ratio = ratio_interval(ours, theirs, confidence) if pairs else None
    return Compared(
        streams=first[0].streams if first else 0,
        figure=figure.name,
        unit=figure.unit,
        want=figure.want,
        first=ours,
        second=theirs,
        ratio=ratio,
        verdict=verdict(ratio, figure.want) if ratio is not None else "not measured",
    )
