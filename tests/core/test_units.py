from __future__ import annotations

import pytest

from modelyard.core.units import format_duration, format_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2 KiB"),
        (1023.9 * 1024, "1.0 MiB"),
        (5 * 2**20, "5.0 MiB"),
        (98_362_432, "94 MiB"),
        (1023.7 * 2**20, "1.0 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes_are_binary(count: float, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "<1 ms"), (0.25, "250 ms"), (1.5, "1.5 s"), (40, "40 s"), (180, "3 min"), (7200, "2 h")],
)
def test_times_below_a_second_are_in_milliseconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
