"""A run as a drawing."""

from __future__ import annotations

import msgspec

from modelyard.measuring.drawing import Dot, svg
from modelyard.tune.plot import plot
from modelyard.tune.report import report
from tests.tune.test_run import Lab, run


async def test_every_setting_is_a_dot_and_the_named_ones_have_names(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, await made.go())
    drawing = plot(told)
    assert len([shape for shape in drawing.shapes if isinstance(shape, Dot)]) == len(told.rows)
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
