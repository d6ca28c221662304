"""Comparisons as a table, as JSON, and as a drawing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench.report import Comparison, draw, save_json, show
from modelyard_bench.drawing import svg

FOUND = [
    Comparison("1 stream", "tok/s", (98.0, 102.0, 100.0), (100.0, 100.0, 100.0), 0.97),
    Comparison("first token <32>", "s", (0.2, 0.22, 0.21), (0.1, 0.1, 0.1), 1.05, at_most=True),
    Comparison("one round", "s", (0.2,), (0.1,)),
]


def test_the_table_has_both_sides_the_ratio_and_the_target() -> None:
    out = io.StringIO()
    show("A & B", FOUND, ("ours", "theirs"), ["a note"], Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    row = next(line for line in lines if "1 stream" in line)
    assert "100 tok/s" in row
    assert "1.000 [0.951, 1.051]" in row
    assert "≥ 0.97× ✓" in row
    assert any("2.098 [" in line and "≤ 1.05× ✗" in line for line in lines)
    assert "· a note" in lines


def test_every_measurement_is_saved(tmp_path: Path) -> None:
    save_json(FOUND, ["a note"], tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["notes"][-1] == "a note"
    assert saved["comparisons"][0]["ours"] == [98.0, 102.0, 100.0]
    assert [one["met"] for one in saved["comparisons"]] == [True, False, None]


def test_the_drawing_has_a_circle_per_ratio_and_stays_on_the_page() -> None:
    drawing = draw("A & B", FOUND)
    tree = ElementTree.fromstring(svg(drawing))
    kinds = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert kinds.count("circle") == len(FOUND)
    assert "A & B" in {element.text for element in tree.iter()}
    points = [point for shape in drawing.shapes for point in getattr(shape, "points", ())]
    assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in points)


def test_a_comparison_pairs_the_values_of_a_round() -> None:
    found = Comparison("x", "", (10.0, 200.0, 3000.0), (5.0, 100.0, 1500.0)).ratio
    assert (found.middle, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_target_is_a_minimum_or_a_maximum() -> None:
    assert Comparison("x", "", (97.0,), (100.0,), 0.97).met is True
    assert Comparison("x", "", (96.0,), (100.0,), 0.97).met is False
    assert Comparison("x", "", (106.0,), (100.0,), 1.05, at_most=True).met is False
    assert Comparison("x", "", (1.0,), (1.0,)).met is None
    assert Comparison("x", "", (1.0,), (1.0,), 0.1, at_most=True).target == "≤ 0.1×"
