from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard import __version__
from modelyard.core.events import CacheReuse, Usage
from modelyard.telemetry.metrics import (
    ALSO_WITHOUT_PREFIX,
    CACHE_HIT_RATIO,
    METRICS,
    HistogramData,
    Labels,
    Metrics,
    MetricsSnapshot,
    bounded_series,
    render_snapshot,
    sum_snapshots,
    without_gauges,
)
from modelyard.telemetry.system import GpuLoad, SystemLoad, SystemMonitor
from tests.telemetry.prometheus_text import sample_values


class FixedMonitor(SystemMonitor):
    def __init__(self) -> None:
        self.started = 1000.0

    def read(self) -> SystemLoad:
        return SystemLoad(75.5, 8 << 30, (GpuLoad("GPU-1", 42.0, 1000),))


def _metrics() -> Metrics:
    return Metrics(FixedMonitor())


# --- specifications ---------------------------------------------------------------------------------------------------


def test_metric_names_that_dashboards_use_exist_with_their_labels() -> None:
    assert METRICS["http_requests_total"].labels == ("endpoint", "method", "status")
    assert METRICS["http_request_duration_seconds"].labels == ("endpoint",)
    assert {"active_requests_current", "cpu_usage_percent", "memory_usage_bytes"} <= METRICS.keys()


def test_every_metric_has_the_prefix_and_the_names_of_infer_server_stay() -> None:
    text = _metrics().render().decode()
    exposed = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(exposed) == len(set(exposed))
    assert {spec.exposed for spec in (*METRICS.values(), CACHE_HIT_RATIO)} <= set(exposed)
    assert all(name.startswith("modelyard_") or f"modelyard_{name}" in exposed for name in exposed)
    assert {
        "http_requests_total",
        "http_request_duration_seconds",
        "active_requests_current",
        "cpu_usage_percent",
        "memory_usage_bytes",
    } <= ALSO_WITHOUT_PREFIX & set(exposed)
    assert "# HELP http_requests_total HTTP requests answered: another name of modelyard_http_requests_total" in text


def test_both_names_have_the_same_values() -> None:
    metrics = _metrics()
    metrics.http_request("/v1/messages", "POST", 200, 0.25)
    metrics.generation_finished("m", Usage(prompt=10, cached=4, output=3), "stop")
    text = metrics.render()
    for name in ("http_requests_total", "http_request_duration_seconds_bucket"):
        assert sample_values(text, f"modelyard_{name}") == sample_values(text, name) != {}
    assert b"\nprompt_tokens_total" not in text


def test_specifications_are_consistent() -> None:
    for spec in METRICS.values():
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert (spec.kind == "histogram") == bool(spec.buckets)
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert spec.aggregation == "sum" or spec.kind == "gauge"


# --- snapshots --------------------------------------------------------------------------------------------------------

_series = st.dictionaries(st.tuples(st.sampled_from("ab")), st.integers(0, 1000).map(float), max_size=2)
_rows = st.dictionaries(
    st.tuples(st.sampled_from("ab")),
    st.builds(HistogramData, st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 99).map(float)),
    max_size=2,
)
snapshots = st.builds(
    MetricsSnapshot,
    counters=st.dictionaries(st.sampled_from(["errors_total", "prompt_tokens_total"]), _series),
    gauges=st.dictionaries(st.sampled_from(["queue_waiting", "gpu_usage_percent", "build_info"]), _series),
    histograms=st.dictionaries(st.just("queue_wait_seconds"), _rows),
)


@given(snapshots, snapshots, snapshots)
@settings(deadline=None, max_examples=50)
def test_snapshots_survive_encoding_and_sum_in_any_order_and_grouping(
    a: MetricsSnapshot, b: MetricsSnapshot, c: MetricsSnapshot
) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(a), type=MetricsSnapshot) == a
    assert sum_snapshots([a, b, c]) == sum_snapshots([c, sum_snapshots([b, a])])


@given(snapshots)
@settings(deadline=None, max_examples=30)
def test_the_sum_of_one_snapshot_is_an_independent_copy(snapshot: MetricsSnapshot) -> None:
    before = msgspec.msgpack.encode(snapshot)
    total = sum_snapshots([MetricsSnapshot(), snapshot])
    assert total == snapshot
    sum_snapshots([total, total])
    for rows in total.histograms.values():
        for row in rows.values():
            row.counts[0] += 1
    assert msgspec.msgpack.encode(snapshot) == before


def test_gauges_are_aggregated_as_their_specification_says() -> None:
    one = MetricsSnapshot(gauges={"queue_waiting": {("m",): 2}, "gpu_usage_percent": {("g",): 70}})
    two = MetricsSnapshot(gauges={"queue_waiting": {("m",): 3}, "gpu_usage_percent": {("g",): 80}})
    start = [MetricsSnapshot(gauges={"process_start_time_seconds": {(): t}}) for t in (9.0, 5.0, 7.0)]
    assert sum_snapshots([one, two]).gauges == {"queue_waiting": {("m",): 5}, "gpu_usage_percent": {("g",): 80}}
    assert sum_snapshots(start).gauges == {"process_start_time_seconds": {(): 5.0}}


def test_without_gauges_keeps_counters_and_histograms() -> None:
    row: dict[Labels, HistogramData] = {("m",): HistogramData([1, 0], 0.5)}
    kept = without_gauges(
        MetricsSnapshot({"errors_total": {("x",): 1}}, {"queue_waiting": {("m",): 4}}, {"queue_wait_seconds": row})
    )
    assert kept == MetricsSnapshot({"errors_total": {("x",): 1}}, {}, {"queue_wait_seconds": row})


def test_a_value_equal_to_a_bound_is_counted_in_that_bucket() -> None:
    metrics, bounds = Metrics(), METRICS["queue_wait_seconds"].buckets
    for value in (bounds[0], bounds[0] + 1e-6, bounds[1], bounds[1] + 1e-6):
        metrics.queue_wait.observe("m", value)
    row = metrics.snapshot().histograms["queue_wait_seconds"][("m",)]
    assert row.counts[:3] == [1, 2, 1]
    assert row.sum == pytest.approx(2 * bounds[0] + 2 * bounds[1] + 2e-6)


# --- text format ------------------------------------------------------------------------------------------------------


def _tokens(prompt: float, cached: float) -> MetricsSnapshot:
    counters = {"prompt_tokens_total": {("m",): prompt}, "cached_tokens_total": {("m",): cached}}
    return MetricsSnapshot(counters)


def test_counters_of_several_processes_add_up() -> None:
    text = render_snapshot(sum_snapshots([_tokens(100, 10), _tokens(300, 290)]))
    assert sample_values(text, "prompt_tokens_total") == {("m",): 400}


def test_the_hit_ratio_is_computed_from_sums_and_only_for_models_with_prompts() -> None:
    text = render_snapshot(sum_snapshots([_tokens(100, 0), _tokens(300, 300)]))
    assert sample_values(text, "cache_hit_ratio") == {("m",): 0.75}
    assert sample_values(render_snapshot(sum_snapshots([_tokens(0, 0)])), "cache_hit_ratio") == {}


def test_histogram_buckets_are_cumulative_and_end_with_infinity() -> None:
    row = HistogramData([0] * 17, 3.5)
    row.counts[0], row.counts[-1] = 2, 1
    text = render_snapshot(MetricsSnapshot(histograms={"queue_wait_seconds": {("m",): row}}))
    buckets = sample_values(text, "queue_wait_seconds_bucket")
    assert buckets["0.001", "m"] == 2
    assert buckets["300.0", "m"] == 2
    assert buckets["+Inf", "m"] == 3
    assert sample_values(text, "queue_wait_seconds_count") == {("m",): 3}
    assert sample_values(text, "queue_wait_seconds_sum") == {("m",): 3.5}


def test_unusual_label_values_are_escaped() -> None:
    label = 'a"b\\c\nd'
    text = render_snapshot(MetricsSnapshot({"errors_total": {(label,): 1}}))
    assert sample_values(text, "errors_total") == {(label,): 1}


def test_no_snapshot_at_all_renders_valid_text() -> None:
    assert b"# TYPE http_requests_total counter" in render_snapshot(sum_snapshots([]))


# --- counting ---------------------------------------------------------------------------------------------------------


def test_requests_are_counted_by_endpoint_method_and_status() -> None:
    metrics = _metrics()
    for status in (200, 200, 503):
        metrics.http_request("/v1/messages", "POST", status, 0.2)
    text = metrics.render()
    assert sample_values(text, "http_requests_total") == {
        ("/v1/messages", "POST", "200"): 2,
        ("/v1/messages", "POST", "503"): 1,
    }
    assert sample_values(text, "http_request_duration_seconds_count") == {("/v1/messages",): 3}
    assert sample_values(text, "http_request_duration_seconds_bucket")["/v1/messages", "0.1"] == 0
    assert sample_values(text, "http_request_duration_seconds_bucket")["/v1/messages", "0.25"] == 3


def test_active_requests_go_up_and_down() -> None:
    metrics = _metrics()
    assert sample_values(metrics.render(), "active_requests_current") == {(): 0}
    metrics.active += 1
    metrics.active += 1
    metrics.active -= 1
    assert sample_values(metrics.render(), "active_requests_current") == {(): 1}
    assert metrics.active == 1


def test_a_finished_generation_counts_tokens_finish_reason_and_cache_hits() -> None:
    metrics = _metrics()
    metrics.generation_finished("m", Usage(prompt=100, cached=75, output=20, reasoning=5), "end")
    metrics.generation_finished("m", Usage(prompt=100, cached=0, output=1), "max_tokens")
    text = metrics.render()
    names = ("prompt_tokens_total", "cached_tokens_total", "output_tokens_total", "reasoning_tokens_total")
    assert [sample_values(text, name)["m",] for name in names] == [200, 75, 21, 5]
    assert sample_values(text, "finish_reasons_total") == {("end",): 1, ("max_tokens",): 1}
    assert sample_values(text, "cache_hit_ratio") == {("m",): 0.375}
    for name in ("prompt", "cached", "output"):
        assert sample_values(text, f"request_{name}_tokens_count") == {("m",): 2}


def test_a_prompt_counted_with_another_choice_is_not_observed_again() -> None:
    metrics = _metrics()
    metrics.generation_finished("m", Usage(prompt=100, cached=75, output=20), "end")
    metrics.generation_finished("m", Usage(output=7), "end")
    text = metrics.render()
    counts = [sample_values(text, f"request_{name}_tokens_count")["m",] for name in ("prompt", "cached", "output")]
    assert counts == [1, 1, 2]


def test_latencies_have_histograms_per_model() -> None:
    metrics = _metrics()
    metrics.first_token.observe("a", 0.3)
    metrics.queue_wait.observe("a", 1.5)
    metrics.inter_token.observe("b", 0.02, times=4)
    metrics.inter_token.observe("b", 0.02)
    text = metrics.render()
    assert sample_values(text, "time_to_first_token_seconds_sum") == {("a",): 0.3}
    assert sample_values(text, "queue_wait_seconds_sum") == {("a",): 1.5}
    assert sample_values(text, "inter_token_seconds_count") == {("b",): 5}
    assert sample_values(text, "inter_token_seconds_bucket")["0.01", "b"] == 0
    assert sample_values(text, "inter_token_seconds_bucket")["0.02", "b"] == 5


def test_events_are_counted_by_their_labels() -> None:
    metrics = _metrics()
    metrics.errors.add(("context_length_exceeded",))
    metrics.warnings.add(("billing_header",))
    metrics.joined.add(("m",))
    metrics.system_prompt_changes.add(("main",))
    for evaluated in (20, 30):
        metrics.cache_lookup("main", CacheReuse(5, evaluated, "evicted"))
    text = metrics.render()
    assert sample_values(text, "errors_total") == {("context_length_exceeded",): 1}
    assert sample_values(text, "request_warnings_total") == {("billing_header",): 1}
    assert sample_values(text, "joined_requests_total") == {("m",): 1}
    assert sample_values(text, "system_prompt_changes_total") == {("main",): 1}
    assert sample_values(text, "cache_requests_total") == {("main", "evicted"): 2}
    assert sample_values(text, "evaluated_tokens_total") == {("main", "evicted"): 50}


def test_label_values_chosen_by_others_are_bounded_in_number() -> None:
    metrics = _metrics()
    for n in range(1500):
        metrics.errors.add((f"code-{n}",))
        metrics.queue_wait.observe(f"model-{n}", 0.1)
    metrics.errors.add(("code-0",))
    snapshot = metrics.snapshot()
    errors, waits = snapshot.counters["errors_total"], snapshot.histograms["queue_wait_seconds"]
    assert (len(errors), errors["other",], errors["code-0",]) == (1001, 500, 2)
    assert (len(waits), sum(waits["other",].counts)) == (1001, 500)


def test_queue_and_pool_values_are_read_at_each_snapshot() -> None:
    metrics = _metrics()
    depths = {"m": 1}
    metrics.queue_depths = lambda: depths
    metrics.pool_values = lambda: {"model_replicas": {"m": 2}, "model_loads_total": {"m": 5}}
    depths["m"] = 3
    text = metrics.render()
    assert sample_values(text, "queue_waiting") == {("m",): 3}
    assert sample_values(text, "model_replicas") == {("m",): 2}
    assert sample_values(text, "model_loads_total") == {("m",): 5}
    depths.clear()
    assert sample_values(metrics.render(), "queue_waiting") == {}


async def test_a_scrape_measures_the_system() -> None:
    text = await _metrics().scrape()
    assert sample_values(text, "cpu_usage_percent") == {(): 75.5}
    assert sample_values(text, "memory_usage_bytes") == {(): 8 << 30}
    assert sample_values(text, "gpu_usage_percent") == {("GPU-1",): 42}
    assert sample_values(text, "gpu_memory_used_bytes") == {("GPU-1",): 1000}
    assert sample_values(text, "process_start_time_seconds") == {(): 1000}
    assert sample_values(text, "modelyard_build_info") == {(__version__,): 1}


async def test_several_processes_sum_their_load_but_count_each_gpu_once() -> None:
    both = [_metrics(), _metrics()]
    for metrics in both:
        await metrics.measure_system()
        metrics.active += 1
    text = render_snapshot(sum_snapshots([metrics.snapshot() for metrics in both]))
    assert sample_values(text, "active_requests_current") == {(): 2}
    assert sample_values(text, "cpu_usage_percent") == {(): 151}
    assert sample_values(text, "memory_usage_bytes") == {(): 16 << 30}
    assert sample_values(text, "gpu_memory_used_bytes") == {("GPU-1",): 1000}
    assert sample_values(text, "modelyard_build_info") == {(__version__,): 1}


def test_usage_by_key_is_bounded_and_its_sum_is_kept() -> None:
    series = {(f"key-{number}", "m"): 1.0 for number in range(1500)}
    bounded = bounded_series(series)
    assert len(bounded) == 1001
    assert bounded["other", "other"] == 500
    assert sum(bounded.values()) == 1500
