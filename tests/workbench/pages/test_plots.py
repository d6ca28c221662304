"""The lines of the last hour, interrupted where there were no requests."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.workbench.pages.plots import (
    SettingPoint,
    chart_options,
    chart_points,
    headline,
    line_points,
    remarks,
    stats,
    table_rows,
    y_axis_label,
)


def test_a_line_is_interrupted_where_there_were_no_requests() -> None:
    history = {"slice_s": 10, "slices": [{"at": at, "waiting": at} for at in (0, 10, 30)]}
    assert line_points(history, lambda slice: slice["waiting"]) == [(0, 0), (10, 10), (20, None), (30, 30)]


def test_an_hour_without_requests_has_no_points() -> None:
    assert line_points({"slice_s": 10, "slices": []}, lambda slice: 1.0) == []


# A run of the optimizer as the workbench shows it: headline, stats, remarks, table and chart.


def row(name: str = "", *, score: float = 1.0, **changes: Any) -> dict[str, Any]:
    base = {"changes": {"n_ubatch": 64}, "trials": 2, "speed": 100.0, "ttft_s": 0.25, "memory": 300 << 20}
    return {"name": name, "score": score, "front": False, "slow": False, **base, **changes}


CURRENT = row("current", score=2.0, changes={}, speed=50.0)
LOSS = {"values": {"type_k": "q4_0"}, "rise": 0.021, "divergence": 0.03, "within": False}


def optimizer_run(**changes: Any) -> dict[str, Any]:
    base = {
        "model": "m",
        "goal": "chat",
        "at": "2026-11-15T12:02:03+00:00",
        "finished": True,
        "better": True,
        "gain": "1.50 times as good",
        "ratio": {"middle": 1.5, "low": 1.4, "high": 1.6},
        "ratios": {"current": {"middle": 1.5, "low": 1.4, "high": 1.6}},
        "trials": 53,
        "grid": 1392,
        "spent_s": 264.9,
        "noise": 0.0467,
        "rows": [row("best", score=3.0, front=True), dict(CURRENT), row(score=1.0, front=True)],
        "losses": [],
        "failures": [],
        "left_out": [],
    }
    return base | changes


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "1.50 times as good"),
        ({"better": False}, "nothing better"),
        ({"better": False, "finished": False}, "cut off"),
        ({"gain": None}, "1.50 times as good"),
        ({"gain": "", "ratio": None}, "the current settings do not run"),
    ],
)
def test_the_headline_names_model_goal_outcome_and_time(changes: dict[str, Any], outcome: str) -> None:
    assert headline(optimizer_run(**changes)) == f"m for chat · {outcome} · 2026-11-15 12:02"


def test_stats_are_ratios_trials_time_and_noise() -> None:
    shown = dict(stats(optimizer_run()))
    assert shown["against current"] == "1.50× [1.40, 1.60]"
    assert shown["trials"] == "53 of 1\u202f392"
    assert shown["noise of a trial"] == "4.7%"
    assert dict(stats(optimizer_run(noise=None)))["noise of a trial"] == "–"


def test_losses_failures_skipped_settings_and_written_files_are_remarks() -> None:
    run = optimizer_run(
        losses=[LOSS], failures=[{"changes": {"n": 1}, "reason": "died"}], left_out=["x: y"], applied=["f"]
    )
    assert remarks(run) == [
        "type_k = q4_0: perplexity +2.10%, divergence 0.0300: too much, never recommended",
        "n = 1 failed: died",
        "not tried: x: y",
        "written to f",
    ]


def test_the_table_has_formatted_numbers() -> None:
    first = table_rows(optimizer_run())[0]
    assert first["setting"] == "best: n_ubatch = 64"
    assert (first["against"], first["speed"], first["first"], first["memory"]) == ("1.50×", "100", "250 ms", "300 MiB")


def test_the_table_of_a_memory_run_compares_memory_and_marks_slow_settings() -> None:
    rows = [row("best", memory=200 << 20), row("current", changes={}), row(memory=100 << 20, slow=True)]
    shown = table_rows(optimizer_run(goal="memory", rows=rows))
    assert [line["against"] for line in shown] == ["1.50×", "1.00×", "too slow"]


def test_a_report_of_an_older_version_is_shown() -> None:
    run = optimizer_run()
    del run["gain"]
    for each in run["rows"]:
        each.pop("slow", None)
    assert headline(run).startswith("m for chat · 1.50 times as good")
    assert [line["against"] for line in table_rows(run)] == ["1.50×", "1.00×", "0.50×"]


# --- the chart --------------------------------------------------------------------------------------------------------

POINTS = [SettingPoint("best", "best: a = 1, b = 2", 300.0, 1.5), SettingPoint("tried", "c = 3", 310.0, 0.9)]


def test_every_setting_is_a_point_relative_to_the_current_one() -> None:
    best, current, other = chart_points(optimizer_run())
    assert (best.kind, best.gain, best.memory) == ("best", 1.5, 300)
    assert (current.kind, current.name, current.gain) == ("current", "current", 1.0)
    assert (other.kind, other.name, other.gain) == ("not beaten", "n_ubatch = 64", 0.5)


def test_for_memory_the_y_axis_is_speed_because_memory_is_the_x_axis() -> None:
    assert [point.gain for point in chart_points(optimizer_run(goal="memory"))] == [2.0, 1.0, 2.0]


def test_without_a_current_row_the_best_is_the_reference() -> None:
    run = optimizer_run(rows=[row(score=4.0), row(score=2.0)])
    assert [point.gain for point in chart_points(run)] == [1.0, 0.5]
    assert "the best = 1" in y_axis_label(run)
    assert [line["against"] for line in table_rows(run)] == ["–", "–"]


def test_a_run_without_measurements_has_no_points() -> None:
    assert chart_points(optimizer_run(rows=[])) == []


def test_the_best_is_drawn_last_and_only_present_kinds_are_in_the_legend() -> None:
    assert [series["name"] for series in chart_options(POINTS)["series"]] == ["tried", "best"]
    newer = [SettingPoint("another baseline", "x", 1.0, 1.0)]
    assert [series["name"] for series in chart_options(newer)["series"]] == ["another baseline"]


def test_a_tooltip_has_one_line_per_value_and_is_not_html() -> None:
    options = chart_options(POINTS)
    assert options["series"][1]["data"][0]["name"] == "best: a = 1\nb = 2\n1.50×, 300 MiB"
    assert options["tooltip"]["renderMode"] == "richText"
