"""Silence is counted in whole ticks of our own."""

from __future__ import annotations

from modelyard.workers.transport import HeartbeatConfig, HeartbeatMonitor


def test_silence_is_noticed_after_the_allowed_ticks() -> None:
    pulse = HeartbeatMonitor(3)
    assert [pulse.tick() for _ in range(5)] == [False, False, False, True, True]


def test_a_word_begins_the_count_anew() -> None:
    pulse = HeartbeatMonitor(2)
    for _ in range(10):
        assert not pulse.tick()
        assert not pulse.tick()
        pulse.reset()


def test_by_default_a_worker_that_is_stopped_is_noticed_within_two_seconds() -> None:
    pace = HeartbeatConfig()
    pulse = HeartbeatMonitor(pace.worker_misses)
    ticks = next(number for number in range(1, 100) if pulse.tick())
    assert ticks * pace.interval_s == pace.detection_s <= 2.0
    assert pace.worker_misses >= 3
