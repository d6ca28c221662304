"""The benchmark's arithmetic."""

from __future__ import annotations

import math

import pytest

from bench.stats import Repeated, Stream, in_flight, latencies, percentile

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
ROLE = b'data: {"delta":{"role":"assistant","content":""}}\n\n'
DONE = b"data: [DONE]\n\n"


def said(word: str) -> bytes:
    return b'data: {"delta":{"content":"%b"}}\n\n' % word.encode()


@pytest.mark.parametrize(("share", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1), (0, 1)])
def test_a_percentile_is_a_measured_value_by_nearest_rank(share: float, expected: int):
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_the_percentile_of_one_value_is_that_value_and_of_none_is_none():
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_the_spread_is_half_the_range_over_the_median():
    found = Repeated((90.0, 100.0, 120.0))
    assert found.median == 100
    assert found.spread == pytest.approx(0.15)


def test_ratios_are_taken_round_by_round():
    assert Repeated((10.0, 30.0)).over(Repeated((5.0, 10.0))).values == (2.0, 3.0)


def test_rounds_that_do_not_pair_have_no_ratio():
    with pytest.raises(ValueError, match="shorter"):
        Repeated((1.0, 2.0)).over(Repeated((1.0,)))


def test_the_first_event_with_its_empty_text_is_no_token():
    stream = Stream(0.0, ((1.0, HEAD + ROLE), (2.0, said("a")), (3.0, said("b") + DONE)))
    assert stream.token_times() == [2.0, 3.0]
    assert stream.events == 3 + 1


def test_an_event_that_came_in_two_reads_is_there_with_the_second():
    whole = said("a")
    for cut in range(1, len(whole)):
        stream = Stream(0.0, ((1.0, HEAD + ROLE + whole[:cut]), (2.0, whole[cut:] + DONE)))
        assert stream.token_times() == [2.0]


def test_a_stream_without_its_end_or_with_an_error_is_not_whole():
    assert Stream(0.0, ((1.0, HEAD + said("a") + DONE),)).is_whole
    assert not Stream(0.0, ((1.0, HEAD + said("a")),)).is_whole
    assert not Stream(0.0, ((1.0, HEAD + ROLE + DONE),)).is_whole
    assert not Stream(0.0, ((1.0, b"HTTP/1.1 503 No\r\n\r\n" + said("a") + DONE),)).is_whole


def test_latencies_are_milliseconds_from_the_request_and_between_tokens():
    found = latencies([Stream(1.0, ((1.2, HEAD + said("a")), (1.3, said("b")), (1.5, said("c") + DONE)))])
    assert found.ttft_p50 == pytest.approx(200)
    assert found.gap_p50 == pytest.approx(100)
    assert found.gap_p99 == pytest.approx(200)


def test_streams_in_flight_are_counted_in_the_middle_of_the_run():
    long = [Stream(float(n), ((100.0, b""),)) for n in range(11)]
    short = [Stream(float(n), ((n + 0.001, b""),)) for n in range(11)]
    assert in_flight(long) == 6
    assert in_flight(short) == 0
    assert in_flight([]) == 0
