"""This process's metrics: counted in plain dicts on the hot path, turned into Prometheus text when somebody asks.

Why not prometheus-client's own counters: a request touches about ten series, and its labelled objects cost 0.3 µs
(child kept) to 1.2 µs (child looked up) each under a lock; a dict entry costs 0.1 µs, and the same dicts travel to
the other gateways as they are. The price: every method belongs to the event loop's thread.

What every request touches is only noted, in lists, and worked up many at a time: when somebody looks, or when many
notes wait. A note costs a tenth of a histogram's row, and C counts a list faster than Python does its items.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct, field
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from modelyard import __version__
from modelyard.core.events import Usage
from modelyard.telemetry.cache_diagnostics import CacheReuse
from modelyard.telemetry.system import SystemLoad, SystemMonitor

__all__ = ["Metrics", "render_snapshots"]

# Every metric that exists, as one table: its name, its labels, and how the values of several processes become one.

Aggregation = Literal["sum", "max", "min"]


class MetricSpec(Struct, frozen=True):
    """A histogram has `buckets`; only a gauge may fold otherwise than by adding."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    fold: Aggregation = "sum"


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0)


def _counter(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", help, labels)


def _histogram(name: str, help: str, label: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name, "histogram", help, (label,), buckets)


def _gauge(name: str, help: str, *labels: str, fold: Aggregation = "sum") -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels, fold=fold)


_ALL = (
    _counter("http_requests_total", "HTTP requests answered", "endpoint", "method", "status"),
    _histogram("http_request_duration_seconds", "HTTP request to the last byte of its answer", "endpoint", _SECONDS),
    _gauge("active_requests_current", "Inference requests in progress"),
    _histogram("time_to_first_token_seconds", "Request accepted to first token", "model", _SECONDS),
    _histogram("inter_token_seconds", "Time between two tokens of one answer", "model", _TOKEN_SECONDS),
    _histogram("queue_wait_seconds", "Time in the queue before a place in an engine was free", "model", _SECONDS),
    _gauge("queue_waiting", "Requests in the queue", "model"),
    _gauge("queue_waiting_tokens", "Prompt tokens of the requests in the queue", "model"),
    _gauge("model_running", "Answers that run", "model"),
    _gauge("model_replicas", "Replicas that take requests", "model"),
    _counter("model_loads_total", "Replicas that were loaded", "model"),
    _counter("model_failures_total", "Loads that failed and engines that were lost", "model"),
    _counter("model_evictions_total", "Replicas that made room for another model", "model"),
    _counter("prompt_tokens_total", "Prompt tokens, the cached ones included", "model"),
    _counter("cached_tokens_total", "Prompt tokens that were found in a KV cache", "model"),
    _counter("output_tokens_total", "Output tokens, the reasoning ones included", "model"),
    _counter("reasoning_tokens_total", "Output tokens spent on reasoning", "model"),
    _histogram("request_prompt_tokens", "Prompt tokens of a request", "model", _TOKENS),
    _histogram("request_cached_tokens", "Cached prompt tokens of a request", "model", _TOKENS),
    _histogram("request_output_tokens", "Output tokens of one answer", "model", _TOKENS),
    _counter("finish_reasons_total", "Answers by what ended them", "reason"),
    _counter("errors_total", "Failed requests by error code", "code"),
    _counter("cache_requests_total", "Prompts by why their cache had no more of them", "cache", "cause"),
    _counter("evaluated_tokens_total", "Prompt tokens that had to be read, by why", "cache", "cause"),
    _counter("system_prompt_changes_total", "Requests whose changed system prompt was not in their cache", "cache"),
    _counter("joined_requests_total", "Requests answered by a job that ran already for the same request", "model"),
    _counter("request_warnings_total", "Requests served with something in them left out", "kind"),
    _gauge("cpu_usage_percent", "CPU use of this program and its children; 100 is one core"),
    _gauge("memory_usage_bytes", "Resident memory of this program and its children"),
    # Every gateway process sees the same GPUs: adding would count them once a process.
    _gauge("gpu_usage_percent", "Use of the GPU by anybody", "gpu", fold="max"),
    _gauge("gpu_memory_used_bytes", "Memory of the GPU used by anybody", "gpu", fold="max"),
    _gauge("process_start_time_seconds", "Start of the oldest process, since 1970", fold="min"),
    _gauge("modelyard_build_info", "The running version, as a label", "version", fold="max"),
)

METRICS: Mapping[str, MetricSpec] = {family.name: family for family in _ALL}

# Not in the table: a ratio cannot be folded, so it is worked out from the folded counters.
CACHE_HIT_RATIO = _gauge("cache_hit_ratio", "Cached share of all prompt tokens so far", "model")


# The values of all metrics at one moment, as plain data: sent between processes, added up, exposed as text.
#
# Counters and histograms only ever grow, so that the totals of a dead process stay true: `lasting` keeps just those.

Labels = tuple[str, ...]
Series = dict[Labels, float]


class HistogramData(Struct):
    """A histogram's values: `counts[i]` lie at or under `buckets[i]` and over the one before; the last is +Inf's."""

    counts: list[int]
    sum: float = 0.0

    def observe(self, buckets: Sequence[float], value: float, times: int = 1) -> None:
        self.counts[bisect_left(buckets, value)] += times
        self.sum += value * times

    def observe_all(self, buckets: Sequence[float], values: Sequence[float]) -> None:
        """Many at once: sorted, they are cut at each bound, which costs a seventh of a search for every value."""
        ranked, below = sorted(values), 0
        for at, bound in enumerate(buckets):
            up_to = bisect_right(ranked, bound)
            self.counts[at] += up_to - below
            below = up_to
        self.counts[-1] += len(ranked) - below
        self.sum += sum(values)


class MetricsSnapshot(Struct):
    counters: dict[str, Series] = field(default_factory=dict)
    gauges: dict[str, Series] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, HistogramData]] = field(default_factory=dict)


_snapshot_encoder = msgspec.msgpack.Encoder()
_snapshot_decoder = msgspec.msgpack.Decoder(MetricsSnapshot)


def encode_snapshot(snapshot: MetricsSnapshot) -> bytes:
    return _snapshot_encoder.encode(snapshot)


def decode_snapshot(data: bytes) -> MetricsSnapshot:
    return _snapshot_decoder.decode(data)


def without_gauges(snapshot: MetricsSnapshot) -> MetricsSnapshot:
    """What a process leaves behind when it dies: a gauge says how things are, and it no longer is."""
    return MetricsSnapshot(counters=snapshot.counters, histograms=snapshot.histograms)


def sum_snapshots(snapshots: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    total = MetricsSnapshot()
    for one in snapshots:
        for name, series in one.counters.items():
            _fold(total.counters.setdefault(name, {}), series, "sum")
        for name, series in one.gauges.items():
            family = METRICS.get(name)
            _fold(total.gauges.setdefault(name, {}), series, family.fold if family else "sum")
        for name, rows in one.histograms.items():
            _add_rows(total.histograms.setdefault(name, {}), rows)
    return total


def _fold(total: Series, series: Series, how: Aggregation) -> None:
    for labels, value in series.items():
        before = total.get(labels)
        if before is None:
            total[labels] = value
        elif how == "sum":
            total[labels] = before + value
        else:
            total[labels] = max(before, value) if how == "max" else min(before, value)


def _add_rows(total: dict[Labels, HistogramData], rows: dict[Labels, HistogramData]) -> None:
    for labels, row in rows.items():
        before = total.get(labels)
        counts = [a + b for a, b in zip(before.counts, row.counts, strict=True)] if before else list(row.counts)
        total[labels] = HistogramData(counts, row.sum + (before.sum if before else 0.0))


# Snapshots as Prometheus text: one process's own, or those of a whole fleet added up.

# The text holds classic names only; every scraper since 2014 reads this version.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_snapshots(snapshots: Sequence[bytes]) -> bytes:
    """The text of several processes' snapshots as if they were one process."""
    return render_snapshot(sum_snapshots(decode_snapshot(data) for data in snapshots))


def render_snapshot(snapshot: MetricsSnapshot) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Reading(snapshot))
    return generate_latest(registry)


class _Reading(Collector):
    """Turns the plain numbers into prometheus-client's own families, at scrape time only."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        for name, family in METRICS.items():
            if family.kind == "counter":
                yield _counter_family(family, snapshot.counters.get(name, {}))
            elif family.kind == "gauge":
                yield _gauge_family(family, snapshot.gauges.get(name, {}))
            else:
                yield _histogram_family(family, snapshot.histograms.get(name, {}))
        yield _gauge_family(CACHE_HIT_RATIO, _hit_ratios(snapshot))


def _counter_family(family: MetricSpec, series: Series) -> Metric:
    metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in series.items():
        metric.add_metric(labels, value)
    return metric


def _gauge_family(family: MetricSpec, series: Series) -> Metric:
    metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in series.items():
        metric.add_metric(labels, value)
    return metric


def _histogram_family(family: MetricSpec, rows: dict[Labels, HistogramData]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    edges = [*(str(edge) for edge in family.buckets), "+Inf"]
    for labels, row in rows.items():
        metric.add_metric(labels, list(zip(edges, accumulate(row.counts), strict=True)), row.sum)
    return metric


def _hit_ratios(snapshot: MetricsSnapshot) -> Series:
    prompts = snapshot.counters.get("prompt_tokens_total", {})
    cached = snapshot.counters.get("cached_tokens_total", {})
    return {labels: cached.get(labels, 0.0) / total for labels, total in prompts.items() if total}


K = TypeVar("K")
V = TypeVar("V")

# A label that a client or an upstream chose (an error code, say) must not grow the memory without end.
_MAX_SERIES = 1000
_MANY = 1024  # notes: to work them up takes about a millisecond


class _Histogram:
    """One histogram's rows by their single label."""

    __slots__ = ("_buckets", "_rows")

    def __init__(self, name: str, home: MetricsSnapshot) -> None:
        self._buckets = METRICS[name].buckets
        self._rows: dict[Labels, HistogramData] = home.histograms.setdefault(name, {})

    def observe(self, label: Labels, value: float, times: int = 1) -> None:
        self._row(label).observe(self._buckets, value, times)

    def observe_all(self, label: Labels, values: Sequence[float]) -> None:
        self._row(label).observe_all(self._buckets, values)

    def _row(self, label: Labels) -> HistogramData:
        row = self._rows.get(label)
        if row is None:
            row = self._rows.setdefault(_bounded(self._rows, label), HistogramData([0] * (len(self._buckets) + 1)))
        return row


def _count(series: Series, labels: Labels, amount: float = 1) -> None:
    try:
        series[labels] += amount
    except KeyError:
        labels = _bounded(series, labels)
        series[labels] = series.get(labels, 0) + amount


def _taken(notes: defaultdict[K, list[V]]) -> list[tuple[K, list[V]]]:
    taken = list(notes.items())
    notes.clear()
    return taken


def _bounded(series: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if len(series) < _MAX_SERIES else ("other",) * len(labels)


class Metrics:
    def __init__(self, machine: SystemMonitor | None = None) -> None:
        self._machine = machine or SystemMonitor()
        self._load = SystemLoad()
        self._depths: Callable[[], Mapping[str, int]] = dict
        self._pool: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        self._now = now = MetricsSnapshot()
        counters, gauges = now.counters, now.gauges
        self._http: Series = counters.setdefault("http_requests_total", {})
        self._prompt: Series = counters.setdefault("prompt_tokens_total", {})
        self._cached: Series = counters.setdefault("cached_tokens_total", {})
        self._output: Series = counters.setdefault("output_tokens_total", {})
        self._reasoning: Series = counters.setdefault("reasoning_tokens_total", {})
        self._reasons: Series = counters.setdefault("finish_reasons_total", {})
        self._errors: Series = counters.setdefault("errors_total", {})
        self._warnings: Series = counters.setdefault("request_warnings_total", {})
        self._joined: Series = counters.setdefault("joined_requests_total", {})
        self._causes: Series = counters.setdefault("cache_requests_total", {})
        self._evaluated: Series = counters.setdefault("evaluated_tokens_total", {})
        self._prompt_changes: Series = counters.setdefault("system_prompt_changes_total", {})
        self.active = 0
        gauges["active_requests_current"] = {(): 0}
        gauges["process_start_time_seconds"] = {(): self._machine.started}
        gauges["modelyard_build_info"] = {(__version__,): 1}
        self._duration = _Histogram("http_request_duration_seconds", now)
        self._first = _Histogram("time_to_first_token_seconds", now)
        self._inter = _Histogram("inter_token_seconds", now)
        self._queue = _Histogram("queue_wait_seconds", now)
        self._prompts = _Histogram("request_prompt_tokens", now)
        self._cacheds = _Histogram("request_cached_tokens", now)
        self._outputs = _Histogram("request_output_tokens", now)
        # Notes: visits by endpoint, method and status, answers by model and reason, looks into a cache by it and cause.
        self._noted = 0
        self._visits: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        self._answers: defaultdict[tuple[str, str], list[Usage]] = defaultdict(list)
        self._looks: defaultdict[Labels, list[int]] = defaultdict(list)
        self._firsts: defaultdict[str, list[float]] = defaultdict(list)
        self._waits: defaultdict[str, list[float]] = defaultdict(list)
        self._gaps: defaultdict[str, list[float]] = defaultdict(list)

    # --- the hot path -------------------------------------------------------------------------------------------

    def http(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """`endpoint` is the route's pattern, never the client's own path: that would be a series a path."""
        self._visits[endpoint, method, status].append(seconds)
        self._noted += 1
        if self._noted >= _MANY:
            self._settle()

    def began(self) -> None:
        self.active += 1

    def ended(self) -> None:
        self.active -= 1

    def first_token(self, model: str, seconds: float) -> None:
        self._firsts[model].append(seconds)

    def inter_token(self, model: str, seconds: float, count: int = 1) -> None:
        """`count` tokens that came `seconds` apart each."""
        if count > 1:
            self._inter.observe((model,), seconds, count)
            return
        gaps = self._gaps[model]
        gaps.append(seconds)
        if len(gaps) >= _MANY:
            self._settle()

    def queued(self, model: str, seconds: float) -> None:
        self._waits[model].append(seconds)

    def finished(self, model: str, usage: Usage, reason: str) -> None:
        self._answers[model, reason].append(usage)
        self._noted += 1
        if self._noted >= _MANY:
            self._settle()

    def failed(self, code: str) -> None:
        _count(self._errors, (code,))

    def joined(self, model: str) -> None:
        _count(self._joined, (model,))

    def warned(self, kind: str) -> None:
        _count(self._warnings, (kind,))

    def looked_up(self, cache: str, reuse: CacheReuse) -> None:
        self._looks[cache, reuse.cause].append(reuse.evaluated)

    def prompt_changed(self, cache: str) -> None:
        _count(self._prompt_changes, (cache,))

    # --- working up the notes -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._noted = 0
        for (endpoint, method, status), seconds in _taken(self._visits):
            _count(self._http, (endpoint, method, str(status)), len(seconds))
            self._duration.observe_all((endpoint,), seconds)
        for (model, reason), usages in _taken(self._answers):
            _count(self._reasons, (reason,), len(usages))
            self._settle_tokens((model,), usages)
        for label, evaluated in _taken(self._looks):
            _count(self._causes, label, len(evaluated))
            _count(self._evaluated, label, sum(evaluated))
        for model, seconds in _taken(self._firsts):
            self._first.observe_all((model,), seconds)
        for model, seconds in _taken(self._waits):
            self._queue.observe_all((model,), seconds)
        for model, seconds in _taken(self._gaps):
            self._inter.observe_all((model,), seconds)

    def _settle_tokens(self, label: Labels, usages: Sequence[Usage]) -> None:
        prompts, outputs = [usage.prompt for usage in usages], [usage.output for usage in usages]
        cached = [usage.cached for usage in usages]
        _count(self._prompt, label, sum(prompts))
        _count(self._cached, label, sum(cached))
        _count(self._output, label, sum(outputs))
        _count(self._reasoning, label, sum([usage.reasoning for usage in usages]))
        if 0 in prompts:  # counted by another answer to it, or not told by a server elsewhere
            cached = [usage.cached for usage in usages if usage.prompt]
            prompts = [prompt for prompt in prompts if prompt]
        if prompts:
            self._prompts.observe_all(label, prompts)
            self._cacheds.observe_all(label, cached)
        self._outputs.observe_all(label, outputs)

    # --- a look at it -------------------------------------------------------------------------------------------

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None:
        """Where to look up each model's queue length: asked at a snapshot, so that queueing itself costs nothing."""
        self._depths = depths

    def watch_pool(self, figures: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        """Where to look up what the models do, by the metric's name and by model: asked at a snapshot, too."""
        self._pool = figures

    async def measure(self) -> None:
        """Read the machine anew, off the event loop. Snapshots in between repeat the last reading."""
        self._load = await asyncio.to_thread(self._machine.read)

    async def scrape(self) -> bytes:
        await self.measure()
        return self.render()

    def render(self) -> bytes:
        return render_snapshot(self._current())

    def snapshot(self) -> bytes:
        return encode_snapshot(self._current())

    def _current(self) -> MetricsSnapshot:
        self._settle()
        gauges, load = self._now.gauges, self._load
        gauges["active_requests_current"] = {(): self.active}
        gauges["queue_waiting"] = {(model,): depth for model, depth in self._depths().items()}
        for name, rows in self._pool().items():
            home = self._now.counters if METRICS[name].kind == "counter" else gauges
            home[name] = {(model,): value for model, value in rows.items()}
        gauges["cpu_usage_percent"] = {(): load.cpu_percent}
        gauges["memory_usage_bytes"] = {(): load.memory}
        gauges["gpu_usage_percent"] = {(gpu.uuid,): gpu.percent for gpu in load.gpus}
        gauges["gpu_memory_used_bytes"] = {(gpu.uuid,): gpu.memory for gpu in load.gpus}
        return self._now
