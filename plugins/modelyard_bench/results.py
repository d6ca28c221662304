"""The plan of a run, and what it has measured: summaries by target, and comparisons with the first target. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard_bench.load import Round, RoundLength, Sample
from modelyard_bench.statistics import (
    Better,
    Distribution,
    Interval,
    Verdict,
    joint_confidence,
    mean_interval,
    ratio_interval,
    verdict,
)
from modelyard_bench.workload import Workload

# --- the plan ---------------------------------------------------------------------------------------------------------

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds: `90`, `30s`, `10m`, `1h`."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or float(match.group(1)) <= 0:
        raise InvalidRequest(f"{text!r} is not a duration such as 90, 30s, 10m or 1h")
    return float(match.group(1)) * _UNITS[match.group(2)]


class Plan(Struct, frozen=True, kw_only=True):
    """`requests` and `seconds` apply to one round at one number of streams; without either a round is short."""

    workload: Workload
    streams: tuple[int, ...]
    rounds: int = 3
    requests: int | None = None
    seconds: float | None = None
    warmup: int = 1  # conversations per stream
    seed: int = 0

    def round_length(self, streams: int) -> RoundLength:
        if self.seconds is not None:
            return RoundLength(seconds=self.seconds)
        turns = self.workload.turns
        requests = self.requests if self.requests is not None else streams * turns * (1 if turns > 1 else 2)
        return RoundLength(conversations=max(1, math.ceil(requests / (streams * turns))))

    def size(self, step: Step) -> float:
        """The work of a step for the progress bar: in responses, or in seconds if rounds have a duration."""
        if step.is_warmup:
            return self.warmup * step.streams * self.workload.turns
        conversations = self.round_length(step.streams).conversations
        if conversations is None:
            return self.seconds or 0.0
        return conversations * step.streams * self.workload.turns

    def steps(self, targets: int) -> Iterator[Step]:
        """A B, B A, A B …: a machine that slows down over time slows all targets alike."""
        if self.warmup:
            yield from (Step(target, max(self.streams), -1) for target in range(targets))
        for number in range(self.rounds):
            for streams in self.streams:
                order = range(targets) if number % 2 == 0 else reversed(range(targets))
                yield from (Step(target, streams, number) for target in order)


class Step(Struct, frozen=True):
    """One round of one target. `number` is negative for the warm-up, which is not counted."""

    target: int
    streams: int
    number: int

    @property
    def is_warmup(self) -> bool:
        return self.number < 0

    @property
    def key(self) -> str:
        """Every round has its own prompts, also those of two targets: both may share one cache."""
        return f"{self.target}/{self.streams}/{self.number}"


class Summary(Struct, frozen=True, kw_only=True):
    """`stream_rate` is tokens per second within a stream after its first token; `prompt_rate` is uncached prompt tokens
    over the time to first token; `tokens_per_s` is the output of all streams over the time of the rounds, prompts
    included. Only complete responses count; the others are in `errors`, by message.
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
    ttft_s: Distribution
    gap_s: Distribution
    total_s: Distribution
    stream_rate: Distribution
    prompt_rate: Distribution
    tokens_per_s: Interval
    requests_per_s: Interval


def summarize(rounds: Sequence[Round]) -> Summary:
    samples = [sample for one in rounds for sample in one.succeeded]
    return Summary(
        streams=rounds[0].streams if rounds else 0,
        rounds=len(rounds),
        answers=len(samples),
        errors=count_errors(rounds),
        wall_s=sum(one.wall_s for one in rounds),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        cached_tokens=sum(sample.cached_tokens for sample in samples),
        output_tokens=sum(sample.output_tokens for sample in samples),
        is_counted=any(sample.is_counted for sample in samples),
        ttft_s=Distribution.of([sample.ttft_s for sample in samples if sample.ttft_s is not None]),
        gap_s=Distribution.of([gap for sample in samples for gap in sample.gaps_s]),
        total_s=Distribution.of([sample.total_s for sample in samples]),
        stream_rate=Distribution.of([rate for sample in samples if (rate := sample.rate) is not None]),
        prompt_rate=Distribution.of([sample.evaluated_tokens / sample.ttft_s for sample in samples if sample.ttft_s]),
        tokens_per_s=mean_interval([one.tokens_per_s for one in rounds]),
        requests_per_s=mean_interval([len(one.succeeded) / one.wall_s for one in rounds if one.wall_s > 0]),
    )


def count_errors(rounds: Sequence[Round]) -> dict[str, int]:
    errors = Counter(sample.error for one in rounds for sample in one.samples if sample.error is not None)
    return dict(errors.most_common())


# --- comparing two targets --------------------------------------------------------------------------------------------


class Metric(Struct, frozen=True):
    """One number of a round by which targets are compared; nan if the round has none."""

    name: str
    unit: str
    better: Better
    of: Callable[[Round], float]


def _mean(value_of: Callable[[Sample], float | None]) -> Callable[[Round], float]:
    def of(one: Round) -> float:
        values = [value for sample in one.succeeded if (value := value_of(sample)) is not None]
        return fmean(values) if values else math.nan

    return of


TTFT = Metric("TTFT", "s", "lower", _mean(lambda sample: sample.ttft_s))
RATE = Metric("tok/s a stream", "tok/s", "higher", _mean(lambda sample: sample.rate))
THROUGHPUT = Metric("tok/s in all", "tok/s", "higher", lambda one: one.tokens_per_s)
METRICS = (TTFT, RATE, THROUGHPUT)


class MetricComparison(Struct, frozen=True, kw_only=True):
    """One metric of two targets over the same rounds; `ratio` is that of the first to the second."""

    streams: int
    figure: str
    unit: str
    want: Better
    first: tuple[float, ...]
    second: tuple[float, ...]
    ratio: Interval | None  # None if no round of both has the metric
    verdict: Verdict | Literal["not measured"]


def compare(
    first: Sequence[Round],
    second: Sequence[Round],
    metrics: Sequence[Metric] = METRICS,
    *,
    confidence: float = 0.95,
    comparisons: int | None = None,
) -> list[MetricComparison]:
    """Round by round. The confidence holds for all `comparisons` of the table together."""
    each = joint_confidence(confidence, comparisons or len(metrics))
    compared = []
    for metric in metrics:
        pairs = [(metric.of(a), metric.of(b)) for a, b in zip(first, second, strict=False)]
        pairs = [(a, b) for a, b in pairs if a > 0 and b > 0]  # neither nan nor a round without a response
        ours, theirs = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
        ratio = ratio_interval(ours, theirs, each) if pairs else None
        compared.append(
            MetricComparison(
                streams=first[0].streams if first else 0,
                figure=metric.name,
                unit=metric.unit,
                want=metric.better,
                first=ours,
                second=theirs,
                ratio=ratio,
                verdict=verdict(ratio, metric.better) if ratio is not None else "not measured",
            )
        )
    return compared


# --- a run ------------------------------------------------------------------------------------------------------------


class TargetInfo(Struct, frozen=True):
    """A target as reports show it: with a label (A, B …)."""

    label: str
    name: str
    model: str = ""


class Pairing(Struct, frozen=True):
    """One metric of a target against that of the first target."""

    target: TargetInfo
    first: TargetInfo
    found: MetricComparison


class BenchmarkResults:
    """The rounds by target and number of streams. An interrupted round counts only where no complete one exists."""

    def __init__(self, plan: Plan, targets: Sequence[TargetInfo]) -> None:
        self.plan, self.targets = plan, tuple(targets)
        self._rounds: dict[tuple[int, int], list[Round]] = {}
        self._interrupted: dict[tuple[int, int], Round] = {}
        self.warmup: list[Round] = []
        self.notes: list[str] = []
        self.is_interrupted = False

    def add(self, step: Step, one: Round, *, complete: bool = True) -> None:
        if step.is_warmup:
            self.warmup.append(one)
        elif complete:
            self._rounds.setdefault((step.target, step.streams), []).append(one)
        elif one.samples:
            self._interrupted[step.target, step.streams] = one

    def set_models(self, models: Sequence[str]) -> None:
        """The names that the servers use, for targets without a given model."""
        named = zip(self.targets, models, strict=True)
        self.targets = tuple(replace(target, model=target.model or model) for target, model in named)

    def rounds(self, target: int, streams: int) -> list[Round]:
        key = (target, streams)
        return self._rounds.get(key) or ([self._interrupted[key]] if key in self._interrupted else [])

    def summaries(self) -> Iterator[tuple[TargetInfo, Summary, list[Round]]]:
        for streams in self.plan.streams:
            for number, target in enumerate(self.targets):
                if rounds := self.rounds(number, streams):
                    yield target, summarize(rounds), rounds

    def pairings(self) -> list[Pairing]:
        """Of complete rounds only, and of as many as both targets have."""
        cells = [
            (number, streams)
            for streams in self.plan.streams
            for number in range(1, len(self.targets))
            if (number, streams) in self._rounds and (0, streams) in self._rounds
        ]
        return [
            Pairing(self.targets[number], self.targets[0], found)
            for number, streams in cells
            for found in compare(
                self._rounds[number, streams], self._rounds[0, streams], comparisons=len(cells) * len(METRICS)
            )
        ]

    @property
    def answers(self) -> int:
        return sum(summary.answers for _, summary, _ in self.summaries())

    @property
    def warmup_errors(self) -> dict[str, int]:
        return count_errors(self.warmup)
