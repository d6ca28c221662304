"""Comparisons shown, kept and drawn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from bench.compared import draw, keep, show
from bench.ratios import Comparison

FOUND = [
    Comparison("1 stream", "tok/s", (98.0, 102.0, 100.0), (100.0, 100.0, 100.0), 0.97),
    Comparison("first token <32>", "s", (0.2, 0.22, 0.21), (0.1, 0.1, 0.1), 1.05, "at most"),
]


def test_the_table_has_both_sides_the_ratio_and_the_verdict():
    out = io.StringIO()
    show("A & B", FOUND, ("ours", "theirs"), ["a note"], Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    row = next(line for line in lines if "1 stream" in line)
    assert "100 tok/s" in row
    assert "1.000 [0.980, 1.020]" in row
    assert "≥ 0.97× ✓" in row
    assert any("2.100 [2.000, 2.200]" in line and "≤ 1.05× ✗" in line for line in lines)
    assert "· a note" in lines


def test_every_measurement_is_kept(tmp_path: Path):
    keep(FOUND, ["a note"], tmp_path / "found.json")
    held = json.loads((tmp_path / "found.json").read_text())
    assert held["notes"][-1] == "a note"
    assert held["found"][0]["ours"] == [98.0, 102.0, 100.0]
    assert [one["met"] for one in held["found"]] == [True, False]


def test_the_drawing_is_xml_with_a_dot_a_line():
    tree = ElementTree.fromstring(draw("A & B", FOUND))
    kinds = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert kinds.count("circle") == len(FOUND)
    assert "A & B" in {element.text for element in tree.iter()}
