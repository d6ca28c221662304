from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.telemetry.metrics import (
    HistogramData,
    Labels,
    MetricsSnapshot,
    decode_snapshot,
    encode_snapshot,
    sum_snapshots,
    without_gauges,
)

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
