"""Numbers as text for people."""

from __future__ import annotations

from modelyard.workbench import formatting as fmt


def test_sizes_have_a_suitable_unit() -> None:
    sizes = {None: "–", 0: "0 B", 1023: "1023 B", 2048: "2 KiB", 5 * 2**20: "5.0 MiB", 3 * 2**29: "1.5 GiB"}
    assert {size: fmt.size(size) for size in sizes} == sizes


def test_durations_have_a_suitable_unit() -> None:
    durations = {
        None: "–", 0.0: "<1 ms", 0.25: "250 ms", 1.25: "1.2 s", 45.0: "45 s", 600.0: "10 min", 7200.0: "2 h",
    }  # fmt: skip
    assert {duration: fmt.duration(duration) for duration in durations} == durations


def test_counts_rates_and_percentages() -> None:
    assert [fmt.count(value) for value in (None, 1234567)] == ["–", "1\u202f234\u202f567"]
    assert [fmt.rate(value) for value in (None, 7.25, 1234.5)] == ["–", "7.2", "1\u202f234"]
    assert [fmt.percent(value) for value in (None, 0.0, 0.555)] == ["–", "0 %", "56 %"]


def test_nouns_are_singular_for_one() -> None:
    assert [fmt.plural(count, "slot") for count in (0, 1, 2048)] == ["0 slots", "1 slot", "2\u202f048 slots"]


def test_a_time_in_the_future_is_now() -> None:
    times = {None: "never", 101.0: "just now", 99.0: "just now", 40.0: "60 s ago"}
    assert {then: fmt.ago(then, 100.0) for then in times} == times
