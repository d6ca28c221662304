"""A run as a drawing."""

from __future__ import annotations

from xml.etree import ElementTree

from modelyard.benchmark.bench.plot import plot
from modelyard.benchmark.drawing import Dot, Drawing, Words, svg
from tests.benchmark.bench.books import filled


def texts(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Words)]


def test_each_subject_has_a_dot_for_each_number_of_streams_in_each_panel() -> None:
    drawing = plot(filled(1.0))
    dots = [shape for shape in drawing.shapes if isinstance(shape, Dot)]
    assert len(dots) == 1 + 3 * 2  # the legend's, and three panels of two
    assert any("time to first token" in text for text in texts(drawing))


def test_two_subjects_get_a_line_for_each_ratio() -> None:
    drawing = plot(filled(1.0, 2.0))
    assert sum(text.startswith("B over A at") for text in texts(drawing)) == 6
    assert drawing.height > plot(filled(1.0)).height


def test_all_of_it_lies_on_the_paper() -> None:
    drawing = plot(filled(1.0, 3.0, 0.2, streams=(1, 2, 64)))
    for shape in drawing.shapes:
        points = shape.points if not isinstance(shape, Dot | Words) else (shape.at,)
        assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in points), shape


def test_ratios_of_one_round_are_left_out_because_they_have_no_interval() -> None:
    assert not any("over" in text for text in texts(plot(filled(1.0, 2.0, rounds=1))))


def test_a_run_without_an_answer_is_still_a_drawing() -> None:
    assert ElementTree.fromstring(svg(plot(filled(1.0, error="gone", ttft_s=None)))) is not None
