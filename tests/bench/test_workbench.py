"""The target is kept at a steady pace and at full load, or it is not kept; the interval stands beside the figure."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.crossover import Pair
from bench.workbench import Feel, Found, show


def found(paced: float, rushed: float) -> Found:
    """A page that costs this; the second server takes a tenth more all the time."""
    shares = ((Pair(0.1 + paced, 0.11),) * 4, (Pair(0.11 + paced, 0.1),) * 4)
    cost = 1 / (1 - rushed)
    answers = ((Pair(1e-3 * cost, 1.1e-3),) * 4, (Pair(1.1e-3 * cost, 1e-3),) * 4)
    return Found(shares, Feel(17.0, 50.0, 1000), answers)


@pytest.mark.parametrize(
    ("paced", "rushed", "good"), [(0.015, 0.01, True), (0.025, 0.01, False), (0.015, 0.025, False)]
)
def test_both_decide(paced: float, rushed: float, good: bool) -> None:
    said = io.StringIO()
    assert show(found(paced, rushed), Console(file=said, width=200)) is good
    first, second, last = said.getvalue().splitlines()
    assert f"costs {paced * 100:.2f} % of the gateway's throughput at 50 requests a second" in first
    assert f"costs {rushed * 100:.2f} % of the gateway's throughput at full load" in second
    assert f"(95 %: {rushed * 100:.2f} to {rushed * 100:.2f}; 8 pairs)" in second
    assert "1000 rows" in last
