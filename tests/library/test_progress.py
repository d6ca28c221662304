"""A bar for people at a terminal, lines for everybody else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from modelyard.library.progress import ProgressReporter, format_size


def test_lines_come_once_a_tenth():
    said: list[str] = []
    with ProgressReporter(Console(file=io.StringIO()), said.append).watch("x.gguf") as told:
        for done in range(0, 2001, 7):
            told(done, 2000)
        told(2000, 2000)
    assert said[:2] == ["fetching x.gguf", "fetching x.gguf: 10 % of 2 kB"]
    assert len(said) == 11


def test_a_size_that_is_not_known_is_no_line():
    said: list[str] = []
    with ProgressReporter(Console(file=io.StringIO()), said.append).watch("x") as told:
        told(5, 0)
    assert said == ["fetching x"]


def test_a_terminal_gets_a_bar_and_no_lines():
    screen, said = io.StringIO(), list[str]()
    with ProgressReporter(Console(file=screen, force_terminal=True, width=100), said.append).watch("x[y].gguf") as told:
        told(500_000, 1_000_000)
    assert "x[y].gguf" in screen.getvalue()
    assert "1.0 MB" in screen.getvalue()
    assert said == []


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (4.7e9, "4.7 GB"), (2e12, "2 TB")]
)
def test_sizes_read_well(count: float, text: str):
    assert format_size(count) == text
