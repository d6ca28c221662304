"""A run as a drawing."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.benchmark.drawing import Dot, svg
from modelyard.tune.plot import Scale, front, gain, plot
from modelyard.tune.report import Row, report
from tests.tune.test_run import Lab, run


async def test_every_setting_is_a_dot_and_the_named_ones_have_names(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, await made.go())
    drawing = plot(told)
    assert len([shape for shape in drawing.shapes if isinstance(shape, Dot)]) == len(told.rows) + 1  # and the key's
    text = svg(drawing)
    assert ">best<" in text
    assert ">current<" in text
    assert told.verdict in text


async def test_dots_stay_inside_the_drawing(tmp_path):
    made = run(Lab(), tmp_path)
    drawing = plot(report(made, await made.go()))
    dots = [shape.at for shape in drawing.shapes if isinstance(shape, Dot)]
    assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in dots)


def test_a_run_that_has_measured_nothing_can_be_drawn(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, made.so_far(), finished=False)
    assert svg(plot(msgspec.structs.replace(told, rows=()))).startswith("<svg")


def test_the_joined_line_never_goes_down_to_the_right():
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 7.0), (4.0, 5.0), (5.0, 2.0)]
    assert front(points) == [(1.0, 9.0), (2.0, 5.0), (5.0, 2.0)]


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


def test_memory_stands_on_one_axis_only():
    row = Row(name="", changes={}, trials=1, score=2.0, speed=30.0, ttft_s=1.0, memory=1, front=True)
    assert [gain(row, goal) for goal in ("chat", "agent", "batch", "memory")] == [2.0, 2.0, 2.0, 30.0]


async def test_where_the_current_settings_do_not_run_the_best_is_the_measure(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, await made.go())
    rows = tuple(msgspec.structs.replace(row, changes={"n": 1}) for row in told.rows if row.name != "current")
    assert "the best = 1" in svg(plot(msgspec.structs.replace(told, rows=rows)))
    assert "current = 1" in svg(plot(told))
