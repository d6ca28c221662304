from __future__ import annotations

from modelyard.telemetry.metrics import (
    HistogramData,
    MetricsSnapshot,
    encode_snapshot,
    render_snapshot,
    render_snapshots,
)
from tests.telemetry.reading import values


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
