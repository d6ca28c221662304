"""Spans of time as people write them."""

from __future__ import annotations

import pytest

from modelyard.benchmark.durations import seconds
from modelyard.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("30s", 30), ("10m", 600), ("1.5h", 5400), (" 2 M ", 120), ("0.5s", 0.5)]
)
def test_a_span_is_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-3s", "0", "3d", "1m30s", "inf"])
def test_what_is_no_span_is_told_how_one_looks(text: str) -> None:
    with pytest.raises(InvalidRequest, match="such as 90, 30s, 10m or 1h"):
        seconds(text)
