"""Recent requests for the admin API: a bounded list of finished requests, and sums of ten seconds for plots.

Kept in memory: a request adds one record and updates one interval. Texts are kept by `request_capture`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from msgspec import Struct, field

from modelyard.core.events import CacheReuse, Timings, Usage

INTERVAL_S = 10
_INTERVALS = 360  # one hour
_SAMPLES = 64  # per kind and interval: enough for a median and a 95th percentile in a plot


class ToolRun(Struct, frozen=True, gc=False):
    """One call of an MCP server's tool in a request. `status` is ok, error, timeout, lost, cancelled, limit, asked (the
    client must approve it) or left_to_client (not run: the client has calls of its own to run first)."""

    server: str
    tool: str
    status: str
    seconds: float = 0.0
    chars: int = 0  # of its result
    at: float = 0.0  # unix time of its end


class SkippedModel(Struct, frozen=True, gc=False):
    """A model of the route that could not answer. `reason` is the code of its error."""

    model: str
    reason: str
    message: str = ""


class RequestRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One choice of one request. `status` is its finish reason or its error code."""

    trace: str
    model: str
    cache: str
    endpoint: str = ""
    key: str = ""
    session: str | None = None
    at: float  # unix time of its end
    status: str
    failed: bool = False
    usage: Usage = Usage()
    timings: Timings = Timings()
    divergence: int | None = None  # the first token that was not in the KV cache
    evicted: bool = False
    reuse: CacheReuse | None = None  # None if unknown
    cost: float = 0.0  # by the model's prices
    skipped: tuple[SkippedModel, ...] = ()  # models of the route that were tried before
    calls: tuple[ToolRun, ...] = ()  # of MCP servers' tools


_NEWEST = 64  # records among which those of a request that ends now are looked for


class HistoryInterval(Struct):
    """Sums of the ten seconds from `at` on."""

    at: int
    requests: int = 0
    failures: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    waiting: int = 0  # the longest queue

    def add(self, record: RequestRecord) -> None:
        usage, timings = record.usage, record.timings
        self.requests += 1
        self.failures += record.failed
        self.prompt += usage.prompt
        self.cached += usage.cached
        self.output += usage.output
        if timings.first_token is not None and len(self.first_token_s) < _SAMPLES:
            self.first_token_s.append(timings.first_token)
            if timings.decode and usage.output > 1:
                self.inter_token_s.append(timings.decode / (usage.output - 1))
                self.tokens_per_s.append((usage.output - 1) / timings.decode)


class History:
    def __init__(self, limit: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=limit)
        self._intervals: deque[HistoryInterval] = deque(maxlen=_INTERVALS)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._interval(record.at).add(record)

    def add_queue_length(self, now: float, waiting: int) -> None:
        interval = self._interval(now)
        interval.waiting = max(interval.waiting, waiting)

    def find(self, trace: str) -> list[RequestRecord]:
        """The records of all choices of a request."""
        return [record for record in self._records if record.trace == trace]

    def ended(self, trace: str) -> list[RequestRecord]:
        """The records of a request that ends now: it is among the newest."""
        return [record for record in itertools.islice(reversed(self._records), _NEWEST) if record.trace == trace]

    def recent(self, limit: int) -> Iterator[RequestRecord]:
        """Newest first."""
        return itertools.islice(reversed(self._records), limit)

    def intervals(self, now: float) -> list[HistoryInterval]:
        """The intervals of the last hour that had requests, oldest first."""
        return [interval for interval in self._intervals if interval.at > now - _INTERVALS * INTERVAL_S]

    def _interval(self, now: float) -> HistoryInterval:
        intervals = self._intervals
        if not intervals or now >= intervals[-1].at + INTERVAL_S:
            intervals.append(HistoryInterval(int(now) // INTERVAL_S * INTERVAL_S))
        return intervals[-1]
