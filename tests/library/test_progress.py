from __future__ import annotations

import io

from rich.console import Console

from modelyard.library.progress import ProgressReporter


def test_a_line_is_written_for_every_tenth() -> None:
    lines: list[str] = []
    with ProgressReporter(Console(file=io.StringIO()), lines.append).track("x.gguf") as on_bytes:
        for done in range(0, 2001, 7):
            on_bytes(done, 2000)
        on_bytes(2000, 2000)
    assert lines[:2] == ["fetching x.gguf", "fetching x.gguf: 10 % of 2 KiB"]
    assert len(lines) == 11


def test_an_unknown_size_writes_no_line() -> None:
    lines: list[str] = []
    with ProgressReporter(Console(file=io.StringIO()), lines.append).track("x") as on_bytes:
        on_bytes(5, 0)
    assert lines == ["fetching x"]


def test_a_terminal_shows_a_bar_and_no_lines() -> None:
    screen, lines = io.StringIO(), list[str]()
    with ProgressReporter(Console(file=screen, force_terminal=True, width=100), lines.append).track(
        "x[y].gguf"
    ) as on_bytes:
        on_bytes(500_000, 1_000_000)
    assert "x[y].gguf" in screen.getvalue()
    assert "KiB" in screen.getvalue()
    assert lines == []
