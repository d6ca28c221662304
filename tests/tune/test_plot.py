"""The report as a drawing."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.benchmark.drawing import Circle, svg
from modelyard.tune.plot import Scale, chart_value, pareto_front, plot
from modelyard.tune.report import ReportRow, make_report
from tests.tune.fakes import FormulaTrials, finished_run, optimizer


def test_every_setting_is_a_circle_and_baselines_have_labels(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    drawing = plot(report)
    assert (
        len([shape for shape in drawing.shapes if isinstance(shape, Circle)]) == len(report.rows) + 1
    )  # and the legend
    text = svg(drawing)
    assert ">best<" in text
    assert ">current<" in text
    assert report.verdict in text


def test_circles_stay_inside_the_drawing(tmp_path):
    made, result = finished_run()
    drawing = plot(make_report(made, result))
    dots = [shape.at for shape in drawing.shapes if isinstance(shape, Circle)]
    assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in dots)


def test_a_report_without_rows_can_be_drawn(tmp_path):
    made = optimizer(FormulaTrials(), tmp_path)
    report = make_report(made, made.interim_result(), finished=False)
    assert svg(plot(msgspec.structs.replace(report, rows=()))).startswith("<svg")


def test_the_pareto_front_never_falls_to_the_right():
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 7.0), (4.0, 5.0), (5.0, 2.0)]
    assert pareto_front(points) == [(1.0, 9.0), (2.0, 5.0), (5.0, 2.0)]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((1.0, 1.7), [1.0, 1.2, 1.4, 1.6]),
        ((0.0, 100.0), [0.0, 50.0, 100.0]),
        ((323.4, 323.7), [320.0, 325.0, 330.0]),
    ],
    ids=["ratios", "from nothing", "nearly the same"],
)
def test_an_axis_has_round_numbers_and_room_for_noise(values, ticks):
    scale = Scale.of(values, 0.0, 1.0)
    assert scale.ticks == ticks
    assert all(0 <= scale.at(value) <= 1 for value in values)


def test_for_memory_the_vertical_axis_is_speed():
    row = ReportRow(name="", changes={}, trials=1, score=2.0, speed=30.0, ttft_s=1.0, memory=1, front=True)
    assert [chart_value(row, goal) for goal in ("chat", "agent", "batch", "memory")] == [2.0, 2.0, 2.0, 30.0]


def test_the_best_is_the_unit_if_the_current_setting_does_not_run(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    rows = tuple(msgspec.structs.replace(row, changes={"n": 1}) for row in report.rows if row.name != "current")
    assert "the best = 1" in svg(plot(msgspec.structs.replace(report, rows=rows)))
    assert "current = 1" in svg(plot(report))
