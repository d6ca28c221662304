"""The chart of a run: a series for each kind of setting, and every dot with its name."""

from __future__ import annotations

from modelyard.workbench.findings import Spot
from modelyard.workbench.pages.optimizer import options

SPOTS = [Spot("best", "best: a = 1, b = 2", 300.0, 1.5), Spot("tried", "c = 3", 310.0, 0.9)]


def test_the_best_is_drawn_last_and_what_is_not_there_has_no_place_in_the_legend() -> None:
    assert [series["name"] for series in options(SPOTS)["series"]] == ["tried", "best"]


def test_a_tooltip_has_a_line_for_each_value_and_is_never_html() -> None:
    told = options(SPOTS)
    assert told["series"][1]["data"][0]["name"] == "best: a = 1\nb = 2\n1.50×, 300 MiB"
    assert told["tooltip"]["renderMode"] == "richText"


def test_a_kind_that_a_newer_version_may_write_is_drawn_all_the_same() -> None:
    assert [series["name"] for series in options([Spot("another baseline", "x", 1.0, 1.0)])["series"]] == [
        "another baseline"
    ]
