"""Prometheus metrics of this process: specifications, counting, snapshots, and the text format.

Values live in plain dicts keyed by label values. A request touches about ten series; prometheus-client's own labelled
metrics take 0.3 to 1.2 µs each under a lock, a dict entry takes 0.1 µs. With several gateway processes each writes the
same dicts to a file (`shared_metrics`). All methods of `Metrics` must be called in the event loop's thread.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal

from msgspec import Struct, field
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from modelyard import __version__
from modelyard.core.events import CacheReuse, Usage
from modelyard.telemetry.system import SystemLoad, SystemMonitor

# The text contains classic names only; every scraper since 2014 reads this version.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Clients and upstream servers choose some label values (error codes, for example): bound the number of series.
_MAX_SERIES = 1000

# --- specifications ---------------------------------------------------------------------------------------------------

Aggregation = Literal["sum", "max", "min"]


PREFIX = "modelyard_"
# Exposed without the prefix, too: infer-server's names, and the one that every Prometheus client has.
ALSO_WITHOUT_PREFIX = frozenset(
    {
        "http_requests_total",
        "http_request_duration_seconds",
        "active_requests_current",
        "cpu_usage_percent",
        "memory_usage_bytes",
        "process_start_time_seconds",
    }
)


class MetricSpec(Struct, frozen=True):
    """`name` is without the prefix. `aggregation` combines the values of several processes; only a gauge may have
    another one than `sum`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    aggregation: Aggregation = "sum"

    @property
    def exposed(self) -> str:
        return PREFIX + self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which it is exposed."""
        return (self.exposed, self.name) if self.name in ALSO_WITHOUT_PREFIX else (self.exposed,)


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0)


def _counter(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", help, labels)


def _histogram(name: str, help: str, label: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name, "histogram", help, (label,), buckets)


def _gauge(name: str, help: str, *labels: str, aggregation: Aggregation = "sum") -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels, aggregation=aggregation)


_ALL = (
    _counter("http_requests_total", "HTTP requests answered", "endpoint", "method", "status"),
    _histogram("http_request_duration_seconds", "HTTP request to the last byte of its response", "endpoint", _SECONDS),
    _gauge("active_requests_current", "Inference requests in progress"),
    _histogram("time_to_first_token_seconds", "Request accepted to first token", "model", _SECONDS),
    _histogram("inter_token_seconds", "Time between two tokens of one response", "model", _TOKEN_SECONDS),
    _histogram("queue_wait_seconds", "Time in the queue before an engine slot was free", "model", _SECONDS),
    _gauge("queue_waiting", "Requests in the queue", "model"),
    _gauge("queue_waiting_tokens", "Prompt tokens of the requests in the queue", "model"),
    _gauge("model_running", "Running generations", "model"),
    _gauge("model_replicas", "Replicas that accept requests", "model"),
    _counter("model_loads_total", "Replicas loaded", "model"),
    _counter("model_failures_total", "Failed loads and lost engines", "model"),
    _counter("model_evictions_total", "Replicas unloaded to make room for another model", "model"),
    _counter("prompt_tokens_total", "Prompt tokens, including cached ones", "model"),
    _counter("cached_tokens_total", "Prompt tokens found in a KV cache", "model"),
    _counter("output_tokens_total", "Output tokens, including reasoning", "model"),
    _counter("reasoning_tokens_total", "Output tokens spent on reasoning", "model"),
    _counter("usage_requests_total", "Requests by API key; those that failed or were cancelled, too", "key", "model"),
    _counter("usage_failed_total", "Requests by API key that failed; cancelled ones did not", "key", "model"),
    _counter(
        "usage_tokens_total", "Tokens by API key; cached: part of prompt, reasoning: of output", "key", "model", "kind"
    ),
    _counter("usage_cost_total", "Cost by API key, by the configured prices", "key", "model", "currency"),
    _histogram("request_prompt_tokens", "Prompt tokens of a request", "model", _TOKENS),
    _histogram("request_cached_tokens", "Cached prompt tokens of a request", "model", _TOKENS),
    _histogram("request_output_tokens", "Output tokens of one response", "model", _TOKENS),
    _counter("finish_reasons_total", "Responses by finish reason", "reason"),
    _counter("repetitions_total", "Outputs that repeated themselves, by what was done", "model", "action"),
    _counter("errors_total", "Failed requests by error code", "code"),
    _counter("cache_requests_total", "Prompts by the reason why their cache held no more of them", "cache", "cause"),
    _counter("evaluated_tokens_total", "Prompt tokens evaluated, by the reason of the cache miss", "cache", "cause"),
    _counter("system_prompt_changes_total", "Requests whose changed system prompt missed the cache", "cache"),
    _counter("joined_requests_total", "Requests that shared the generation of an identical running request", "model"),
    _counter("fallbacks_total", "Requests that a model of a route could not answer, by the reason", "model", "reason"),
    _counter("request_warnings_total", "Warnings about ignored parts of requests, by kind", "kind"),
    _counter("tool_calls_total", "Calls of MCP servers' tools by their end", "server", "status"),
    _histogram("tool_call_seconds", "Time that a call of an MCP server's tool took", "server", _SECONDS),
    _gauge("cpu_usage_percent", "CPU use of this program and its children; 100 is one core"),
    _gauge("memory_usage_bytes", "Resident memory of this program and its children"),
    # Every gateway process reports the same GPUs: a sum would count them once per process.
    _gauge("gpu_usage_percent", "GPU utilization by all programs", "gpu", aggregation="max"),
    _gauge("gpu_memory_used_bytes", "GPU memory used by all programs", "gpu", aggregation="max"),
    _gauge("process_start_time_seconds", "Start of the oldest process, since 1970", aggregation="min"),
    _gauge("build_info", "The running version, as a label", "version", aggregation="max"),
)

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _ALL}

# Counters that are the sums of histograms.
_SUMMED = {
    "prompt_tokens_total": "request_prompt_tokens",
    "cached_tokens_total": "request_cached_tokens",
    "output_tokens_total": "request_output_tokens",
}

# Not in the table: a ratio cannot be aggregated, so it is computed from the aggregated counters.
CACHE_HIT_RATIO = _gauge("cache_hit_ratio", "Cached share of all prompt tokens so far", "model")


# --- snapshots --------------------------------------------------------------------------------------------------------

Labels = tuple[str, ...]
Series = dict[Labels, float]


class HistogramData(Struct):
    """`counts[i]` is the number of values in (`buckets[i - 1]`, `buckets[i]`]; the last one is for +Inf."""

    counts: list[int]
    sum: float = 0.0


class MetricsSnapshot(Struct):
    """The values of all metrics at one moment."""

    counters: dict[str, Series] = field(default_factory=dict)
    gauges: dict[str, Series] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, HistogramData]] = field(default_factory=dict)


def without_gauges(snapshot: MetricsSnapshot) -> MetricsSnapshot:
    """What remains valid after the process has exited: counters and histograms only grow, gauges are gone."""
    return MetricsSnapshot(counters=snapshot.counters, histograms=snapshot.histograms)


def sum_snapshots(snapshots: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    """Combine the snapshots of several processes, each metric by its aggregation."""
    total = MetricsSnapshot()
    for snapshot in snapshots:
        for name, series in snapshot.counters.items():
            _aggregate(total.counters.setdefault(name, {}), series, "sum")
        for name, series in snapshot.gauges.items():
            spec = METRICS.get(name)
            _aggregate(total.gauges.setdefault(name, {}), series, spec.aggregation if spec else "sum")
        for name, rows in snapshot.histograms.items():
            into = total.histograms.setdefault(name, {})
            for labels, row in rows.items():
                old = into.get(labels) or HistogramData([0] * len(row.counts))
                counts = [a + b for a, b in zip(old.counts, row.counts, strict=True)]
                into[labels] = HistogramData(counts, old.sum + row.sum)
    return total


def _aggregate(total: Series, series: Series, aggregation: Aggregation) -> None:
    for labels, value in series.items():
        old = total.get(labels)
        if old is None:
            total[labels] = value
        elif aggregation == "sum":
            total[labels] = old + value
        else:
            total[labels] = max(old, value) if aggregation == "max" else min(old, value)


# --- text format ------------------------------------------------------------------------------------------------------


def render_snapshot(snapshot: MetricsSnapshot) -> bytes:
    registry = CollectorRegistry()
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)


class _SnapshotCollector(Collector):
    """Converts a snapshot to prometheus-client's metric families."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        values = snapshot.counters | snapshot.gauges
        for name, spec in METRICS.items():
            if spec.kind == "histogram":
                yield from _histogram_families(spec, snapshot.histograms.get(name, {}))
            else:
                yield from _value_families(spec, values.get(name, {}))
        prompts = snapshot.counters.get("prompt_tokens_total", {})
        cached = snapshot.counters.get("cached_tokens_total", {})
        ratios = {labels: cached.get(labels, 0.0) / total for labels, total in prompts.items() if total}
        yield from _value_families(CACHE_HIT_RATIO, ratios)


def _value_families(spec: MetricSpec, series: Series) -> Iterator[Metric]:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    for name in spec.names:
        family: CounterMetricFamily | GaugeMetricFamily = kind(name, _help(spec, name), labels=spec.labels)
        for labels, value in series.items():
            family.add_metric(labels, value)
        yield family


def _histogram_families(spec: MetricSpec, rows: dict[Labels, HistogramData]) -> Iterator[Metric]:
    bounds = [*(str(bound) for bound in spec.buckets), "+Inf"]
    for name in spec.names:
        family = HistogramMetricFamily(name, _help(spec, name), labels=spec.labels)
        for labels, row in rows.items():
            family.add_metric(labels, list(zip(bounds, accumulate(row.counts), strict=True)), row.sum)
        yield family


def _help(spec: MetricSpec, name: str) -> str:
    return spec.help if name == spec.exposed else f"{spec.help}: another name of {spec.exposed}"


# --- counting ---------------------------------------------------------------------------------------------------------


class _Counter:
    __slots__ = ("_series",)

    def __init__(self, name: str, snapshot: MetricsSnapshot) -> None:
        self._series: Series = snapshot.counters.setdefault(name, {})

    def add(self, labels: Labels, amount: float = 1) -> None:
        try:
            self._series[labels] += amount
        except KeyError:
            labels = _bounded(self._series, labels)
            self._series[labels] = self._series.get(labels, 0) + amount


class _Histogram:
    __slots__ = ("_buckets", "_rows", "_series")

    def __init__(self, name: str, snapshot: MetricsSnapshot) -> None:
        self._buckets = METRICS[name].buckets
        self._series: dict[Labels, HistogramData] = snapshot.histograms.setdefault(name, {})
        self._rows: dict[str, HistogramData] = {}  # the same by their only label, for `observe`

    def observe(self, label: str, value: float, times: int = 1) -> None:
        row = self._rows.get(label)
        if row is None:
            labels = _bounded(self._series, (label,))
            row = self._series.setdefault(labels, HistogramData([0] * (len(self._buckets) + 1)))
            self._rows[labels[0]] = row
        row.counts[bisect_left(self._buckets, value)] += times
        row.sum += value * times


def _bounded(series: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if len(series) < _MAX_SERIES else ("other",) * len(labels)


def bounded_series(series: Mapping[Labels, float]) -> Series:
    """The first ones as they are, the sum of the others."""
    found: Series = {}
    for labels, value in series.items():
        kept = _bounded(found, labels)
        found[kept] = found.get(kept, 0) + value
    return found


class Metrics:
    def __init__(self, monitor: SystemMonitor | None = None) -> None:
        self._monitor = monitor or SystemMonitor()
        self._load = SystemLoad()
        # Called for each snapshot: queue lengths by model, usage by metric and labels, the pool's values by metric.
        self.queue_depths: Callable[[], Mapping[str, int]] = dict
        self.usage_series: Callable[[], Mapping[str, Mapping[Labels, float]]] = dict
        self.pool_values: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        self._snapshot = snapshot = MetricsSnapshot()
        snapshot.gauges["process_start_time_seconds"] = {(): self._monitor.started}
        snapshot.gauges["build_info"] = {(__version__,): 1}
        self.active = 0  # requests in progress
        self._http_requests = _Counter("http_requests_total", snapshot)
        self._http_duration = _Histogram("http_request_duration_seconds", snapshot)
        self.first_token = _Histogram("time_to_first_token_seconds", snapshot)
        self.inter_token = _Histogram("inter_token_seconds", snapshot)
        self.queue_wait = _Histogram("queue_wait_seconds", snapshot)
        self._reasoning_total = _Counter("reasoning_tokens_total", snapshot)
        self._prompt_tokens = _Histogram("request_prompt_tokens", snapshot)
        self._cached_tokens = _Histogram("request_cached_tokens", snapshot)
        self._output_tokens = _Histogram("request_output_tokens", snapshot)
        self._finish_reasons = _Counter("finish_reasons_total", snapshot)
        self.repetitions = _Counter("repetitions_total", snapshot)
        self.errors = _Counter("errors_total", snapshot)
        self.warnings = _Counter("request_warnings_total", snapshot)  # their kinds come from us, not from clients
        self.joined = _Counter("joined_requests_total", snapshot)
        self.fallbacks = _Counter("fallbacks_total", snapshot)
        self._tool_calls = _Counter("tool_calls_total", snapshot)
        self._tool_seconds = _Histogram("tool_call_seconds", snapshot)
        self._cache_requests = _Counter("cache_requests_total", snapshot)
        self._evaluated_tokens = _Counter("evaluated_tokens_total", snapshot)
        self.system_prompt_changes = _Counter("system_prompt_changes_total", snapshot)

    def http_request(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """`endpoint` is the route's pattern, not the client's path: a series per path would be unbounded."""
        self._http_requests.add((endpoint, method, str(status)))
        self._http_duration.observe(endpoint, seconds)

    def generation_finished(self, model: str, usage: Usage, reason: str) -> None:
        self._finish_reasons.add((reason,))
        self._reasoning_total.add((model,), usage.reasoning)
        if usage.prompt:  # 0: counted with another choice of the request, or not reported by a remote server
            self._prompt_tokens.observe(model, usage.prompt)
            self._cached_tokens.observe(model, usage.cached)
        self._output_tokens.observe(model, usage.output)

    def inputs_read(self, model: str, usage: Usage) -> None:
        """Embeddings or a ranking: prompt tokens without an answer."""
        if usage.prompt:
            self._prompt_tokens.observe(model, usage.prompt)

    def tool_called(self, server: str, status: str, seconds: float) -> None:
        self._tool_calls.add((server, status))
        self._tool_seconds.observe(server, seconds)

    def cache_lookup(self, cache: str, reuse: CacheReuse) -> None:
        labels = (cache, reuse.cause)
        self._cache_requests.add(labels)
        self._evaluated_tokens.add(labels, reuse.evaluated)

    async def measure_system(self) -> None:
        """Measure CPU, memory and GPUs in a thread. Snapshots repeat the last measurement."""
        self._load = await asyncio.to_thread(self._monitor.read)

    async def scrape(self) -> bytes:
        await self.measure_system()
        return self.render()

    def render(self) -> bytes:
        return render_snapshot(self.snapshot())

    def snapshot(self) -> MetricsSnapshot:
        """The counters, with the gauges brought up to date."""
        gauges, load = self._snapshot.gauges, self._load
        for name, histogram in _SUMMED.items():
            rows = self._snapshot.histograms[histogram]
            self._snapshot.counters[name] = {labels: row.sum for labels, row in rows.items()}
        gauges["active_requests_current"] = {(): self.active}
        gauges["queue_waiting"] = {(model,): depth for model, depth in self.queue_depths().items()}
        for name, series in self.usage_series().items():
            self._snapshot.counters[name] = bounded_series(series)
        for name, values in self.pool_values().items():
            target = self._snapshot.counters if METRICS[name].kind == "counter" else gauges
            target[name] = {(model,): value for model, value in values.items()}
        gauges["cpu_usage_percent"] = {(): load.cpu_percent}
        gauges["memory_usage_bytes"] = {(): load.memory}
        gauges["gpu_usage_percent"] = {(gpu.uuid,): gpu.percent for gpu in load.gpus}
        gauges["gpu_memory_used_bytes"] = {(gpu.uuid,): gpu.memory for gpu in load.gpus}
        return self._snapshot
