"""What changes places between two servers is told apart from what the servers are like."""

from __future__ import annotations

import pytest

from bench.crossover import Pair, added, all_crossed, judged, lost, share
from bench.ratios import Interval


def test_what_one_server_takes_more_all_the_time_is_gone_from_the_sum() -> None:
    slow, fast, page = 0.5, 0.3, 0.01
    on_slow, on_fast = [Pair(slow + page, fast)] * 5, [Pair(fast + page, slow)] * 5
    found = all_crossed([on_slow, on_fast], added)
    assert (found.middle, found.low, found.high) == pytest.approx((page, page, page))


def test_a_share_of_throughput_comes_out_as_it_went_in() -> None:
    slow, fast, kept = 3e-4, 2e-4, 0.98
    found = all_crossed([[Pair(slow / kept, fast)] * 3, [Pair(fast / kept, slow)] * 3] * 2, lost)
    assert share(found.middle) == pytest.approx(0.02)


def test_one_wild_pair_moves_neither_the_middle_nor_the_interval_far() -> None:
    steady = [Pair(1.0 + number / 1000, 1.0) for number in range(10)]
    found = all_crossed([[*steady, Pair(9.0, 1.0)], [*steady, Pair(1.0, 1.0)]], added)
    assert 0 < found.low <= found.middle <= found.high < 0.01


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_block_without_its_counterpart_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="changed places"):
        all_crossed([[Pair(1.0, 1.0)]] * count, added)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.01, 0.019, "kept"), (0.001, 0.03, "undecided"), (0.02, 0.03, "missed"), (-0.01, 0.02, "undecided")],
)
def test_the_whole_interval_decides(low: float, high: float, verdict: str) -> None:
    assert judged(Interval((low + high) / 2, low, high), 0.02) == verdict
