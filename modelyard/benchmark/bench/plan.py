"""What is measured in which order: rounds of all subjects, there and back, so that none is always first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from modelyard.benchmark.lanes import Extent
from modelyard.benchmark.workload import Workload


class Plan(Struct, frozen=True, kw_only=True):
    """`requests` and `seconds` are of one round at one number of streams; neither set is a short round."""

    workload: Workload
    streams: tuple[int, ...]
    rounds: int = 3
    requests: int | None = None
    seconds: float | None = None
    warmup: int = 1  # conversations a stream
    seed: int = 0

    def extent(self, streams: int) -> Extent:
        if self.seconds is not None:
            return Extent(seconds=self.seconds)
        turns = self.workload.turns
        asked = self.requests if self.requests is not None else streams * turns * (1 if turns > 1 else 2)
        return Extent(conversations=max(1, math.ceil(asked / (streams * turns))))

    def answers(self, streams: int) -> int | None:
        """How many a round will bring, where that is known beforehand."""
        conversations = self.extent(streams).conversations
        return None if conversations is None else conversations * streams * self.workload.turns


class Step(Struct, frozen=True):
    """One round of one subject; `number` is negative for the warm-up, which is not counted."""

    subject: int
    streams: int
    number: int

    @property
    def is_warmup(self) -> bool:
        return self.number < 0

    @property
    def key(self) -> str:
        """No two rounds ask the same, not even of two subjects: both may stand behind one cache."""
        return f"{self.subject}/{self.streams}/{self.number}"


def steps(plan: Plan, subjects: int) -> Iterator[Step]:
    """A B, B A, A B …: a machine that grows slower all the while slows both alike."""
    if plan.warmup:
        yield from (Step(subject, max(plan.streams), -1) for subject in range(subjects))
    for number in range(plan.rounds):
        for streams in plan.streams:
            order = range(subjects) if number % 2 == 0 else reversed(range(subjects))
            yield from (Step(subject, streams, number) for subject in order)
