"""The lines of the last hour, interrupted where there were no requests."""

from __future__ import annotations

from modelyard.workbench.pages.plots import line_points


def test_a_line_is_interrupted_after_a_minute_without_requests() -> None:
    history = {"slice_s": 10, "slices": [{"at": at, "waiting": at} for at in (0, 10, 200)]}
    assert line_points(history, lambda slice: slice["waiting"]) == [(0, 0), (10, 10), (20, None), (200, 200)]


def test_an_hour_without_requests_has_no_points() -> None:
    assert line_points({"slice_s": 10, "slices": []}, lambda slice: 1.0) == []
