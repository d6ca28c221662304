"""Samples: what arrivals come to."""

from __future__ import annotations

import pytest

from modelyard.benchmark.sample import Arrivals, Round, Sample


def test_the_first_token_and_each_gap_after_it_are_kept() -> None:
    arrivals = Arrivals(10.0)
    for at in (10.5, 10.6, 10.8):
        arrivals.add(at)
    sample = arrivals.sample(11.0, prompt_tokens=7, cached_tokens=3, output_tokens=3)
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.gaps_s == pytest.approx((0.1, 0.2))
    assert sample.total_s == pytest.approx(1.0)
    assert sample.rate == pytest.approx(2 / 0.3)
    assert (sample.evaluated_tokens, sample.output_tokens, sample.is_counted) == (4, 3, False)


def test_tokens_that_come_together_share_their_wait() -> None:
    arrivals = Arrivals(0.0)
    arrivals.add(1.0)
    arrivals.add(1.4, tokens=4)
    assert arrivals.sample(2.0, output_tokens=5).gaps_s == pytest.approx((0.1,) * 4)


def test_pieces_are_weighed_by_the_number_of_tokens_that_the_server_tells() -> None:
    arrivals = Arrivals(0.0)
    for at in (1.0, 1.2, 1.4, 1.6):
        arrivals.add(at)
    sample = arrivals.sample(2.0, output_tokens=8)
    assert sample.gaps_s == pytest.approx((0.1,) * 3)
    assert sample.rate == pytest.approx(10.0)


def test_where_nobody_tells_the_pieces_are_counted_and_it_is_said() -> None:
    arrivals = Arrivals(0.0)
    arrivals.add(1.0)
    arrivals.add(2.0)
    sample = arrivals.sample(2.0)
    assert (sample.output_tokens, sample.is_counted) == (2, True)


def test_no_token_is_no_time_and_no_rate() -> None:
    arrivals = Arrivals(0.0)
    arrivals.add(1.0, tokens=0)
    sample = arrivals.sample(3.0, error="broke")
    assert (sample.ttft_s, sample.rate, sample.output_tokens, sample.error) == (None, None, 0, "broke")


def test_tokens_that_all_came_at_once_have_no_rate() -> None:
    assert Sample(output_tokens=3, ttft_s=1.0, gaps_s=(0.0, 0.0)).rate is None


def test_the_good_of_a_round_are_those_without_an_error() -> None:
    good, bad = Sample(output_tokens=1), Sample(error="no")
    assert Round(streams=1, wall_s=1.0, samples=(good, bad)).good == [good]
