"""Snapshots as Prometheus text: one process's own, or those of a whole fleet added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from modelyard.telemetry.families import CACHE_HIT_RATIO, FAMILIES, Family
from modelyard.telemetry.snapshot import Distribution, Labels, Series, Snapshot, add, decode

# The text holds classic names only; every scraper since 2014 reads this version.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def merge(snapshots: Sequence[bytes]) -> bytes:
    """The text of several processes' snapshots as if they were one process."""
    return expose(add(decode(data) for data in snapshots))


def expose(snapshot: Snapshot) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Reading(snapshot))
    return generate_latest(registry)


class _Reading(Collector):
    """Turns the plain numbers into prometheus-client's own families, at scrape time only."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        for name, family in FAMILIES.items():
            if family.kind == "counter":
                yield _counter(family, snapshot.counters.get(name, {}))
            elif family.kind == "gauge":
                yield _gauge(family, snapshot.gauges.get(name, {}))
            else:
                yield _histogram(family, snapshot.histograms.get(name, {}))
        yield _gauge(CACHE_HIT_RATIO, _hit_ratios(snapshot))


def _counter(family: Family, series: Series) -> Metric:
    metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in series.items():
        metric.add_metric(labels, value)
    return metric


def _gauge(family: Family, series: Series) -> Metric:
    metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in series.items():
        metric.add_metric(labels, value)
    return metric


def _histogram(family: Family, rows: dict[Labels, Distribution]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    edges = [*(str(edge) for edge in family.buckets), "+Inf"]
    for labels, row in rows.items():
        metric.add_metric(labels, list(zip(edges, accumulate(row.counts), strict=True)), row.sum)
    return metric


def _hit_ratios(snapshot: Snapshot) -> Series:
    prompts = snapshot.counters.get("prompt_tokens_total", {})
    cached = snapshot.counters.get("cached_tokens_total", {})
    return {labels: cached.get(labels, 0.0) / total for labels, total in prompts.items() if total}
