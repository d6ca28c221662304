"""What was answered lately: a bounded list of finished requests, and ten-second sums of the last hour for plots.

Kept in memory and small: a request adds one record and touches one sum. Texts are not here but in `papers.py`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from msgspec import Struct, field

from modelyard.core.events import Timings, Usage
from modelyard.telemetry.cache_diagnostics import CacheReuse

INTERVAL_S = 10
_SLICES = 360  # an hour
_SAMPLES = 64  # of each kind and slice: enough for a median and a 95th percentile that people look at


class RequestRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One choice of one request. `status` is its finish reason, or the code of its error."""

    trace: str
    model: str
    cache: str
    endpoint: str = ""
    key: str = ""
    session: str | None = None
    at: float  # unix time at which it ended
    status: str
    failed: bool = False
    usage: Usage = Usage()
    timings: Timings = Timings()
    divergence: int | None = None  # the first token that no cached KV covered
    evicted: bool = False
    reuse: CacheReuse | None = None  # None where nobody could know


class HistoryInterval(Struct):
    """The sums of ten seconds from `at` on."""

    at: int
    requests: int = 0
    failures: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    waiting: int = 0  # the longest queue that was seen


class History:
    def __init__(self, limit: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=limit)
        self._slices: deque[HistoryInterval] = deque(maxlen=_SLICES)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)
        _sum(self._slice(record.at), record)

    def saw_queue(self, now: float, waiting: int) -> None:
        current = self._slice(now)
        current.waiting = max(current.waiting, waiting)

    def find(self, trace: str) -> list[RequestRecord]:
        """Every choice of a request, or nothing."""
        return [record for record in self._records if record.trace == trace]

    def recent(self, limit: int) -> Iterator[RequestRecord]:
        """The newest first."""
        return itertools.islice(reversed(self._records), limit)

    def slices(self, now: float) -> list[HistoryInterval]:
        """Those of the last hour, the oldest first; ten seconds in which nothing happened have none."""
        return [one for one in self._slices if one.at > now - _SLICES * INTERVAL_S]

    def _slice(self, now: float) -> HistoryInterval:
        slices = self._slices
        if not slices or now >= slices[-1].at + INTERVAL_S:
            slices.append(HistoryInterval(int(now) // INTERVAL_S * INTERVAL_S))
        return slices[-1]


def _sum(current: HistoryInterval, record: RequestRecord) -> None:
    usage, timings = record.usage, record.timings
    current.requests += 1
    current.failures += record.failed
    current.prompt += usage.prompt
    current.cached += usage.cached
    current.output += usage.output
    if timings.first_token is not None and len(current.first_token_s) < _SAMPLES:
        current.first_token_s.append(timings.first_token)
        if timings.decode and usage.output > 1:
            current.inter_token_s.append(timings.decode / (usage.output - 1))
            current.tokens_per_s.append((usage.output - 1) / timings.decode)
