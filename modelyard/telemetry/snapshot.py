"""The values of all metrics at one moment, as plain data: sent between processes, added up, exposed as text.

Counters and histograms only ever grow, so that the totals of a dead process stay true: `lasting` keeps just those.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, field

from modelyard.telemetry.families import FAMILIES, Fold

Labels = tuple[str, ...]
Series = dict[Labels, float]


class Distribution(Struct):
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


class Snapshot(Struct):
    counters: dict[str, Series] = field(default_factory=dict)
    gauges: dict[str, Series] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, Distribution]] = field(default_factory=dict)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode(snapshot: Snapshot) -> bytes:
    return _encoder.encode(snapshot)


def decode(data: bytes) -> Snapshot:
    return _decoder.decode(data)


def lasting(snapshot: Snapshot) -> Snapshot:
    """What a process leaves behind when it dies: a gauge says how things are, and it no longer is."""
    return Snapshot(counters=snapshot.counters, histograms=snapshot.histograms)


def add(snapshots: Iterable[Snapshot]) -> Snapshot:
    total = Snapshot()
    for one in snapshots:
        for name, series in one.counters.items():
            _fold(total.counters.setdefault(name, {}), series, "sum")
        for name, series in one.gauges.items():
            family = FAMILIES.get(name)
            _fold(total.gauges.setdefault(name, {}), series, family.fold if family else "sum")
        for name, rows in one.histograms.items():
            _add_rows(total.histograms.setdefault(name, {}), rows)
    return total


def _fold(total: Series, series: Series, how: Fold) -> None:
    for labels, value in series.items():
        before = total.get(labels)
        if before is None:
            total[labels] = value
        elif how == "sum":
            total[labels] = before + value
        else:
            total[labels] = max(before, value) if how == "max" else min(before, value)


def _add_rows(total: dict[Labels, Distribution], rows: dict[Labels, Distribution]) -> None:
    for labels, row in rows.items():
        before = total.get(labels)
        counts = [a + b for a, b in zip(before.counts, row.counts, strict=True)] if before else list(row.counts)
        total[labels] = Distribution(counts, row.sum + (before.sum if before else 0.0))
