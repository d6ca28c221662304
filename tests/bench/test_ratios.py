"""Ratios of rounds, their intervals, and whether a target is met."""

from __future__ import annotations

from bench.ratios import Comparison, interval


def test_rounds_are_compared_with_their_own_counterparts():
    found = Comparison("x", "", (10.0, 200.0, 3000.0), (5.0, 100.0, 1500.0))
    assert (found.ratio.middle, found.ratio.low, found.ratio.high) == (2.0, 2.0, 2.0)


def test_an_interval_holds_the_median_and_is_the_same_every_time():
    values = [1.0, 1.1, 0.9, 1.05, 0.95, 3.0]
    found = interval(values)
    assert found == interval(values)
    assert 0.9 <= found.low < found.middle < found.high <= 3.0


def test_more_confidence_is_a_wider_interval():
    values = [float(n) for n in range(20)]
    narrow, wide = interval(values, 0.5), interval(values, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_a_target_is_a_least_or_a_most():
    assert Comparison("x", "", (97.0,), (100.0,), 0.97).met is True
    assert Comparison("x", "", (96.0,), (100.0,), 0.97).met is False
    assert Comparison("x", "", (106.0,), (100.0,), 1.05, "at most").met is False
    assert Comparison("x", "", (1.0,), (1.0,)).met is None
    assert Comparison("x", "", (1.0,), (1.0,), 0.1, "at most").target == "≤ 0.1×"
