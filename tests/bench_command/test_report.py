"""Tables and JSON of a run."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from modelyard_bench.drawing import Circle, Drawing, Label, svg
from modelyard_bench.load import Round, Sample
from modelyard_bench.report import notes, plot, show, values
from modelyard_bench.results import BenchmarkResults, Step
from tests.bench_command.fakes import filled_results


def printed(results: BenchmarkResults) -> str:
    file = io.StringIO()
    show(results, Console(file=file, width=80))
    return file.getvalue()


def test_a_table_shows_percentiles_and_rates_for_each_number_of_streams() -> None:
    text = printed(filled_results(1.0, rounds=2))
    assert "A http://h:0 m" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("A  ")]
    assert [row[:3] for row in rows] == [["A", "1", "2"], ["A", "4", "8"]]
    assert "100/102/102" in rows[0]
    assert "ratio" not in text


@pytest.mark.parametrize(
    ("scale", "expected"), [(2.0, "B is worse"), (0.5, "B is better"), (1.0, "no difference beyond noise")]
)
def test_two_targets_get_a_verdict_per_line(scale: float, expected: str) -> None:
    lines = [line for line in printed(filled_results(1.0, scale)).splitlines() if line.startswith("B over A")]
    assert len(lines) == 6
    assert all(line.rstrip().endswith(expected) for line in lines)
    assert all("[" in line for line in lines)


def test_one_round_of_two_targets_gives_no_verdict() -> None:
    text = printed(filled_results(1.0, 2.0, rounds=1))
    assert "one round gives no interval" in text
    assert "is worse" not in text


def test_errors_are_counted_in_the_table_and_listed_below_it() -> None:
    results = filled_results(1.0, streams=(1,))
    failed = Sample(error="no [room]")
    results.add(Step(0, 1, 9), Round(streams=1, wall_s=1.0, samples=(failed, failed)))
    results.add(Step(0, 1, -1), Round(streams=1, wall_s=1.0, samples=(Sample(error="cold"),)))
    text = printed(results)
    assert "4 +2 failed" in text
    assert "error 2 × A at 1: no [room]" in text
    assert "error 1 × in the warm-up: cold" in text


def test_a_server_without_usage_is_noted() -> None:
    assert any("the server reports no usage" in note for note in notes(filled_results(1.0, is_counted=True)))


def test_equal_lengths_are_noted_once() -> None:
    lines = [note for note in notes(filled_results(1.0)) if note.startswith("A at")]
    assert lines == ["A at 1, 4: 64 prompt tokens, 0 of them cached, 10 output tokens"]


def test_a_run_without_a_response_can_be_printed() -> None:
    text = printed(filled_results(1.0, streams=(1,), error="gone"))
    assert "A at 1: no response" in text
    assert "–/–/–" in text
    assert "nothing was measured" in printed(filled_results(1.0, rounds=0))


def test_an_interrupted_run_is_noted() -> None:
    results = filled_results(1.0)
    results.is_interrupted = True
    assert "interrupted" in printed(results)
    assert values(results)["interrupted"] is True


def test_json_has_results_comparisons_and_every_sample_without_its_gaps() -> None:
    found = msgspec.json.decode(msgspec.json.encode(values(filled_results(1.0, 2.0, rounds=1))))
    assert found["plan"] == {
        "streams": [1, 4], "rounds": 1, "requests": None, "seconds": None, "warmup": 1, "seed": 7
    }  # fmt: skip
    assert [(r["subject"], r["streams"], r["answers"]) for r in found["results"]] == [
        ("A", 1, 1), ("B", 1, 1), ("A", 4, 4), ("B", 4, 4)
    ]  # fmt: skip
    sample = found["results"][0]["of_rounds"][0]["samples"][0]
    assert (sample["ttft_s"], sample["output_tokens"], sample["rate"]) == (0.1, 10, pytest.approx(100.0))
    assert "gaps_s" not in sample
    assert found["comparisons"][0]["over"] == "A"
    assert found["comparisons"][0]["ratio"]["high"] is None  # infinite: one round
    assert {c["verdict"] for c in found["comparisons"]} == {"no difference beyond noise"}


# The results of a run as a drawing.


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
