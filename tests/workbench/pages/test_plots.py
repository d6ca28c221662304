"""Lines over the last hour, with breaks where nothing happened."""

from __future__ import annotations

from modelyard.workbench.pages.plots import line


def test_a_line_breaks_where_nothing_happened_for_a_minute() -> None:
    told = {"slice_s": 10, "slices": [{"at": at, "waiting": at} for at in (0, 10, 200)]}
    assert line(told, lambda one: one["waiting"]) == [(0, 0), (10, 10), (20, None), (200, 200)]


def test_an_hour_without_requests_is_no_line() -> None:
    assert line({"slice_s": 10, "slices": []}, lambda one: 1.0) == []
