"""Numbers as people read them."""

from __future__ import annotations

import pytest

from modelyard.workbench import words


@pytest.mark.parametrize(
    ("count", "told"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (2048, "2 KB"), (5 * 2**20, "5 MB"), (3 * 2**29, "1.5 GB")],
)
def test_bytes_have_the_unit_that_fits(count: int | None, told: str) -> None:
    assert words.size(count) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "–"), (0.0, "<1 ms"), (0.25, "250 ms"), (1.25, "1.2 s"), (45.0, "45 s"), (600.0, "10 min"),
        (7200.0, "2 h"),
    ],
)  # fmt: skip
def test_seconds_have_the_unit_that_fits(value: float | None, told: str) -> None:
    assert words.seconds(value) == told


def test_thousands_stand_apart() -> None:
    assert words.count(1234567) == "1\u202f234\u202f567"
    assert words.count(None) == "–"


def test_a_rate_has_a_decimal_only_where_it_is_seen() -> None:
    assert [words.rate(value) for value in (None, 7.25, 1234.5)] == ["–", "7.2", "1\u202f234"]


def test_a_share_is_a_percentage() -> None:
    assert [words.share(value) for value in (None, 0.0, 0.555)] == ["–", "0 %", "56 %"]


def test_a_time_that_lies_ahead_is_now() -> None:
    assert [words.ago(then, 100.0) for then in (None, 101.0, 99.0, 40.0)] == [
        "never",
        "just now",
        "just now",
        "60 s ago",
    ]
