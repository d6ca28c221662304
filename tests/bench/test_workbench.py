"""What an open page costs is the difference of each round, and the target is kept or missed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.workbench import Feel, Round, Rush, show


@pytest.mark.parametrize(
    ("opened", "rushed", "good"), [(0.115, 990.0, True), (0.125, 990.0, False), (0.115, 975.0, False)]
)
def test_the_middle_round_decides(opened: float, rushed: float, good: bool) -> None:
    said = io.StringIO()
    rounds = [Round(0.1, 0.1), Round(0.1, opened), Round(0.1, 0.9)]
    rushes = [Rush(1000.0, 1000.0), Rush(1000.0, rushed), Rush(1000.0, 500.0)]
    assert show(rounds, Feel(17.0, 50.0, 1000), rushes, Console(file=said, width=200)) is good
    assert f"{(opened - 0.1) * 100:.2f} %" in said.getvalue()
    assert f"{100 - rushed / 10:.2f} %" in said.getvalue()
    assert "1000 rows" in said.getvalue()
