from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard import __version__
from modelyard.core.events import Usage
from modelyard.telemetry.cache_diagnostics import CacheReuse
from modelyard.telemetry.metrics import (
    METRICS,
    HistogramData,
    Labels,
    Metrics,
    MetricsSnapshot,
    decode_snapshot,
    encode_snapshot,
    render_snapshot,
    render_snapshots,
    sum_snapshots,
    without_gauges,
)
from modelyard.telemetry.system import GpuLoad, SystemLoad, SystemMonitor
from tests.telemetry.reading import values


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


_series = st.dictionaries(st.tuples(st.sampled_from("ab")), st.integers(0, 1000).map(float), max_size=2)
_rows = st.dictionaries(
    st.tuples(st.sampled_from("ab")),
    st.builds(HistogramData, st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 99).map(float)),
    max_size=2,
)
snapshots = st.builds(
    MetricsSnapshot,
    counters=st.dictionaries(st.sampled_from(["errors_total", "prompt_tokens_total"]), _series),
    gauges=st.dictionaries(st.sampled_from(["queue_waiting", "gpu_usage_percent", "modelyard_build_info"]), _series),
    histograms=st.dictionaries(st.just("queue_wait_seconds"), _rows),
)


@given(snapshots)
@settings(deadline=None, max_examples=50)
def test_a_snapshot_survives_the_wire(snapshot: MetricsSnapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


@given(snapshots, snapshots, snapshots)
@settings(deadline=None, max_examples=50)
def test_adding_is_the_same_in_any_order_and_grouping(
    a: MetricsSnapshot, b: MetricsSnapshot, c: MetricsSnapshot
) -> None:
    assert sum_snapshots([a, b, c]) == sum_snapshots([c, sum_snapshots([b, a])])


@given(snapshots)
@settings(deadline=None, max_examples=50)
def test_one_snapshot_added_to_nothing_is_itself_and_a_copy(snapshot: MetricsSnapshot) -> None:
    before = encode_snapshot(snapshot)
    total = sum_snapshots([MetricsSnapshot(), snapshot])
    assert total == snapshot
    sum_snapshots([total, total])
    for rows in total.histograms.values():
        for row in rows.values():
            row.counts[0] += 1
    assert encode_snapshot(snapshot) == before


def test_gauges_fold_as_their_family_says() -> None:
    one = MetricsSnapshot(gauges={"queue_waiting": {("m",): 2}, "gpu_usage_percent": {("g",): 70}})
    two = MetricsSnapshot(gauges={"queue_waiting": {("m",): 3}, "gpu_usage_percent": {("g",): 80}})
    start = [MetricsSnapshot(gauges={"process_start_time_seconds": {(): t}}) for t in (9.0, 5.0, 7.0)]
    assert sum_snapshots([one, two]).gauges == {"queue_waiting": {("m",): 5}, "gpu_usage_percent": {("g",): 80}}
    assert sum_snapshots(start).gauges == {"process_start_time_seconds": {(): 5.0}}


def test_the_dead_leave_counters_and_histograms_but_no_gauge() -> None:
    row: dict[Labels, HistogramData] = {("m",): HistogramData([1, 0], 0.5)}
    left = without_gauges(
        MetricsSnapshot({"errors_total": {("x",): 1}}, {"queue_waiting": {("m",): 4}}, {"queue_wait_seconds": row})
    )
    assert left == MetricsSnapshot({"errors_total": {("x",): 1}}, {}, {"queue_wait_seconds": row})


def test_a_value_on_a_buckets_edge_belongs_to_it() -> None:
    row = HistogramData([0, 0, 0])
    for value in (1.0, 1.5, 2.0, 2.5):
        row.observe((1.0, 2.0), value)
    assert row.counts == [1, 2, 1]
    assert row.sum == 7.0


_values = st.integers(0, 9) | st.floats(0, 9) | st.sampled_from([0.5, 1.0, 2.5, 5.0])


@given(st.lists(_values, max_size=50))
@settings(deadline=None, max_examples=100)
def test_many_values_at_once_are_observed_as_one_by_one(values: list[float]) -> None:
    buckets = (0.5, 1.0, 2.5, 5.0)
    each, many = HistogramData([0] * 5), HistogramData([0] * 5)
    for value in values:
        each.observe(buckets, value)
    many.observe_all(buckets, values)
    assert many.counts == each.counts
    assert many.sum == pytest.approx(each.sum)


def _tokens(prompt: float, cached: float) -> bytes:
    return encode_snapshot(
        MetricsSnapshot({"prompt_tokens_total": {("m",): prompt}, "cached_tokens_total": {("m",): cached}})
    )


def test_counters_of_several_processes_add_up() -> None:
    text = render_snapshots([_tokens(100, 10), _tokens(300, 290)])
    assert values(text, "prompt_tokens_total") == {("m",): 400}


def test_the_hit_ratio_is_worked_out_from_the_sums_not_averaged() -> None:
    assert values(render_snapshots([_tokens(100, 0), _tokens(300, 300)]), "cache_hit_ratio") == {("m",): 0.75}


def test_a_model_without_prompts_has_no_hit_ratio() -> None:
    assert values(render_snapshots([_tokens(0, 0)]), "cache_hit_ratio") == {}


def test_histogram_buckets_are_cumulative_and_end_with_infinity() -> None:
    row = HistogramData([0] * 17, 3.5)
    row.counts[0], row.counts[-1] = 2, 1
    text = render_snapshot(MetricsSnapshot(histograms={"queue_wait_seconds": {("m",): row}}))
    buckets = values(text, "queue_wait_seconds_bucket")
    assert buckets["0.001", "m"] == 2
    assert buckets["300.0", "m"] == 2
    assert buckets["+Inf", "m"] == 3
    assert values(text, "queue_wait_seconds_count") == {("m",): 3}
    assert values(text, "queue_wait_seconds_sum") == {("m",): 3.5}


def test_odd_label_values_are_escaped() -> None:
    odd = 'a"b\\c\nd'
    assert values(render_snapshot(MetricsSnapshot({"errors_total": {(odd,): 1}})), "errors_total") == {(odd,): 1}


def test_nothing_at_all_is_still_valid_text() -> None:
    assert b"# TYPE http_requests_total counter" in render_snapshots([])


class StillMachine(SystemMonitor):
    def __init__(self) -> None:
        self.started = 1000.0

    def read(self) -> SystemLoad:
        return SystemLoad(75.5, 8 << 30, (GpuLoad("GPU-1", 42.0, 1000),))


def _metrics() -> Metrics:
    return Metrics(StillMachine())


def test_requests_are_counted_by_endpoint_method_and_status() -> None:
    metrics = _metrics()
    for status in (200, 200, 503):
        metrics.http("/v1/messages", "POST", status, 0.2)
    text = metrics.render()
    assert values(text, "http_requests_total") == {
        ("/v1/messages", "POST", "200"): 2,
        ("/v1/messages", "POST", "503"): 1,
    }
    assert values(text, "http_request_duration_seconds_count") == {("/v1/messages",): 3}
    assert values(text, "http_request_duration_seconds_bucket")["/v1/messages", "0.1"] == 0
    assert values(text, "http_request_duration_seconds_bucket")["/v1/messages", "0.25"] == 3


def test_active_requests_go_up_and_down() -> None:
    metrics = _metrics()
    assert values(metrics.render(), "active_requests_current") == {(): 0}
    metrics.began()
    metrics.began()
    metrics.ended()
    assert values(metrics.render(), "active_requests_current") == {(): 1}
    assert metrics.active == 1


def test_a_finished_request_counts_its_tokens_its_reason_and_the_cache_hits() -> None:
    metrics = _metrics()
    metrics.finished("m", Usage(prompt=100, cached=75, output=20, reasoning=5), "end")
    metrics.finished("m", Usage(prompt=100, cached=0, output=1), "max_tokens")
    text = metrics.render()
    names = ("prompt_tokens_total", "cached_tokens_total", "output_tokens_total", "reasoning_tokens_total")
    assert [values(text, name)["m",] for name in names] == [200, 75, 21, 5]
    assert values(text, "finish_reasons_total") == {("end",): 1, ("max_tokens",): 1}
    assert values(text, "cache_hit_ratio") == {("m",): 0.375}
    for name in ("prompt", "cached", "output"):
        assert values(text, f"request_{name}_tokens_count") == {("m",): 2}


def test_latencies_have_histograms_of_their_own_per_model() -> None:
    metrics = _metrics()
    metrics.first_token("a", 0.3)
    metrics.queued("a", 1.5)
    metrics.inter_token("b", 0.02, count=4)
    text = metrics.render()
    assert values(text, "time_to_first_token_seconds_sum") == {("a",): 0.3}
    assert values(text, "queue_wait_seconds_sum") == {("a",): 1.5}
    assert values(text, "inter_token_seconds_count") == {("b",): 4}
    assert values(text, "inter_token_seconds_sum") == {("b",): 0.08}


def test_gaps_between_tokens_that_came_one_by_one_are_counted_like_those_that_came_together() -> None:
    one_by_one, together = _metrics(), _metrics()
    for _ in range(3000):  # more than are noted before they are worked up
        one_by_one.inter_token("m", 0.25)
    together.inter_token("m", 0.25, count=3000)
    for name in ("inter_token_seconds_count", "inter_token_seconds_sum", "inter_token_seconds_bucket"):
        assert values(one_by_one.render(), name) == values(together.render(), name)


def test_errors_and_warnings_are_counted_by_their_word() -> None:
    metrics = _metrics()
    metrics.failed("context_length_exceeded")
    metrics.warned("billing_header")
    assert values(metrics.render(), "errors_total") == {("context_length_exceeded",): 1}
    assert values(metrics.render(), "request_warnings_total") == {("billing_header",): 1}


def test_labels_that_others_choose_cannot_grow_the_memory_without_end() -> None:
    metrics = _metrics()
    for n in range(1500):
        metrics.failed(f"code-{n}")
        metrics.queued(f"model-{n}", 0.1)
    metrics.failed("code-0")
    errors = values(metrics.render(), "errors_total")
    assert len(errors) == 1001
    assert errors["other",] == 500
    assert errors["code-0",] == 2
    assert values(metrics.render(), "queue_wait_seconds_count")["other",] == 500


def test_the_queue_is_looked_up_when_somebody_asks() -> None:
    metrics = _metrics()
    depths = {"m": 1}
    metrics.watch_queue(lambda: depths)
    depths["m"] = 3
    assert values(metrics.render(), "queue_waiting") == {("m",): 3}
    depths.clear()
    assert values(metrics.render(), "queue_waiting") == {}


def test_what_the_models_do_is_looked_up_when_somebody_asks() -> None:
    metrics = _metrics()
    metrics.watch_pool(lambda: {"model_replicas": {"m": 2}, "model_loads_total": {"m": 5}})
    assert values(metrics.render(), "model_replicas") == {("m",): 2}
    assert values(metrics.render(), "model_loads_total") == {("m",): 5}


async def test_a_scrape_measures_the_machine_anew() -> None:
    text = await _metrics().scrape()
    assert values(text, "cpu_usage_percent") == {(): 75.5}
    assert values(text, "memory_usage_bytes") == {(): 8 << 30}
    assert values(text, "gpu_usage_percent") == {("GPU-1",): 42}
    assert values(text, "gpu_memory_used_bytes") == {("GPU-1",): 1000}
    assert values(text, "process_start_time_seconds") == {(): 1000}
    assert values(text, "modelyard_build_info") == {(__version__,): 1}


async def test_a_fleet_of_one_renders_as_the_process_itself() -> None:
    metrics = _metrics()
    metrics.http("/v1/messages", "POST", 200, 0.2)
    metrics.finished("m", Usage(10, 5, 3), "end")
    assert render_snapshots([metrics.snapshot()]) == metrics.render()


async def test_a_fleet_adds_load_but_sees_each_gpu_once() -> None:
    both = [_metrics(), _metrics()]
    for metrics in both:
        await metrics.measure()
        metrics.began()
    text = render_snapshots([metrics.snapshot() for metrics in both])
    assert values(text, "active_requests_current") == {(): 2}
    assert values(text, "cpu_usage_percent") == {(): 151}
    assert values(text, "memory_usage_bytes") == {(): 16 << 30}
    assert values(text, "gpu_memory_used_bytes") == {("GPU-1",): 1000}
    assert values(text, "modelyard_build_info") == {(__version__,): 1}


def test_what_many_requests_left_is_the_same_as_if_each_was_counted_at_once() -> None:
    at_once, many = _metrics(), _metrics()
    for n in range(3000):
        for metrics in (at_once, many):
            metrics.http("/v1/messages", "POST", 200 + n % 2, n / 100)
            metrics.first_token("m", n / 1000)
            metrics.queued("m", 0.5)
            metrics.looked_up("main", CacheReuse(n, 2, "none" if n % 3 else "evicted"))
            metrics.finished(f"m{n % 2}", Usage(n % 7, n % 5, n, 1), "end" if n % 4 else "max_tokens")
        at_once._settle()
    assert values(many.render(), "http_requests_total")["/v1/messages", "POST", "200"] == 1500
    assert values(many.render(), "request_prompt_tokens_count") == {("m0",): 1285, ("m1",): 1286}
    for name in ("http_request_duration_seconds", "time_to_first_token_seconds", "request_output_tokens"):
        assert values(at_once.render(), f"{name}_bucket") == values(many.render(), f"{name}_bucket")
        assert values(at_once.render(), f"{name}_sum") == pytest.approx(values(many.render(), f"{name}_sum"))
    for name in ("prompt", "cached", "output", "reasoning", "evaluated"):
        assert values(at_once.render(), f"{name}_tokens_total") == values(many.render(), f"{name}_tokens_total")
    for name in ("finish_reasons_total", "cache_requests_total"):
        assert values(at_once.render(), name) == values(many.render(), name)


def test_notes_do_not_pile_up_while_nobody_looks() -> None:
    metrics = _metrics()
    for _ in range(5000):
        metrics.first_token("m", 0.1)
        metrics.http("/v1/messages", "POST", 200, 0.1)
    assert sum(map(len, (*metrics._visits.values(), *metrics._firsts.values()))) < 2 * 1024
