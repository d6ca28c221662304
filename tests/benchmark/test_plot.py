"""The results of a run as a drawing."""

from __future__ import annotations

from xml.etree import ElementTree

from modelyard.benchmark.drawing import Circle, Drawing, Label, svg
from modelyard.benchmark.plot import plot
from tests.benchmark.fakes import filled_results


def texts(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Label)]


def test_each_target_has_a_circle_for_each_number_of_streams_in_each_panel() -> None:
    drawing = plot(filled_results(1.0))
    circles = [shape for shape in drawing.shapes if isinstance(shape, Circle)]
    assert len(circles) == 1 + 3 * 2  # the legend, and three panels of two
    assert any("time to first token" in text for text in texts(drawing))


def test_two_targets_get_a_line_for_each_ratio() -> None:
    drawing = plot(filled_results(1.0, 2.0))
    assert sum(text.startswith("B over A at") for text in texts(drawing)) == 6
    assert drawing.height > plot(filled_results(1.0)).height


def test_every_shape_is_inside_the_drawing() -> None:
    drawing = plot(filled_results(1.0, 3.0, 0.2, streams=(1, 2, 64)))
    for shape in drawing.shapes:
        points = shape.points if not isinstance(shape, Circle | Label) else (shape.at,)
        assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in points), shape


def test_ratios_of_one_round_are_left_out() -> None:
    assert not any("over" in text for text in texts(plot(filled_results(1.0, 2.0, rounds=1))))


def test_a_run_without_a_response_can_be_drawn() -> None:
    assert ElementTree.fromstring(svg(plot(filled_results(1.0, error="gone", ttft_s=None)))) is not None
