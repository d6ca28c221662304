"""The arithmetic of the benchmark: percentiles, medians with their spread, token times out of a stream's raw bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from msgspec import Struct

# A delta that says something: the first event of a stream names the role and carries an empty text.
_SAYS = re.compile(rb'"content": ?"[^"]')


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: always a value that was measured."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


class Repeated(Struct, frozen=True):
    """One number, measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values) if self.values else float("nan")

    @property
    def spread(self) -> float:
        """Half of the range between the lowest and the highest, as a share of the median."""
        if not self.values or not self.median:
            return float("nan")
        return (max(self.values) - min(self.values)) / 2 / self.median

    def over(self, other: Repeated) -> Repeated:
        """The ratios of what was measured in the same round."""
        return Repeated(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


class Stream(Struct, frozen=True):
    """When a stream was asked for, and what came when: `parts` are (time, bytes) as the socket gave them."""

    sent: float
    parts: tuple[tuple[float, bytes], ...]

    @property
    def ended(self) -> float:
        return self.parts[-1][0]

    @property
    def is_whole(self) -> bool:
        raw = b"".join(data for _, data in self.parts)
        return raw.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in raw and _SAYS.search(raw) is not None

    @property
    def events(self) -> int:
        return b"".join(data for _, data in self.parts).count(b"\ndata: ")

    def token_times(self) -> list[float]:
        """When each event that says something was there whole; several in one read came at the same time."""
        times: list[float] = []
        rest = b""
        for time, data in self.parts:
            head, end, rest = (rest + data).rpartition(b"\n\n")
            if end:
                times += [time] * len(_SAYS.findall(head))
        return times


class Latencies(Struct, frozen=True):
    """In milliseconds."""

    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float


def latencies(streams: Iterable[Stream]) -> Latencies:
    firsts: list[float] = []
    gaps: list[float] = []
    for stream in streams:
        if times := stream.token_times():
            firsts.append((times[0] - stream.sent) * 1000)
            gaps += [(later - earlier) * 1000 for earlier, later in pairwise(times)]
    return Latencies(*(percentile(values, share) for values in (firsts, gaps) for share in (50, 99)))


def in_flight(streams: Sequence[Stream], samples: int = 101) -> int:
    """How many streams ran at once: the median over moments in the middle half of the run."""
    if not streams:
        return 0
    began, ended = min(s.sent for s in streams), max(s.sent for s in streams)
    moments = [began + (ended - began) * (0.25 + 0.5 * i / (samples - 1)) for i in range(samples)]
    return int(median(sum(s.sent <= moment < s.ended for s in streams) for moment in moments))
