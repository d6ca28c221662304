from __future__ import annotations

from modelyard.telemetry.metrics import METRICS


def test_the_names_that_dashboards_know_exist_with_their_labels() -> None:
    assert METRICS["http_requests_total"].labels == ("endpoint", "method", "status")
    assert METRICS["http_request_duration_seconds"].labels == ("endpoint",)
    assert {"active_requests_current", "cpu_usage_percent", "memory_usage_bytes"} <= METRICS.keys()


def test_counters_end_in_total_and_only_histograms_have_buckets() -> None:
    for family in METRICS.values():
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert (family.kind == "histogram") == bool(family.buckets)
        assert list(family.buckets) == sorted(set(family.buckets))


def test_only_gauges_fold_otherwise_than_by_adding() -> None:
    assert all(family.fold == "sum" for family in METRICS.values() if family.kind != "gauge")
