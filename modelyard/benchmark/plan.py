"""The plan of a run: how long each round is, and the order of the rounds. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from msgspec import Struct

from modelyard.benchmark.load import RoundLength
from modelyard.benchmark.workload import Workload
from modelyard.core.errors import InvalidRequest

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
