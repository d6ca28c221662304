"""Agents that arrive together: what they evaluate, counted with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.arrivals import measure
from tests.engines.llama_cpp import tiny_models


async def test_a_shared_prefix_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    await measure(Path(tiny_models.coder()), 3, 300, 40, 200, 2, {"n_threads": 1})
    shown = capsys.readouterr().out
    assert "300 shared + 40 own tokens" in shown
    assert f"{300 + 3 * 40} tokens evaluated" in shown  # the minimum
    assert f"{3 * 140} tokens evaluated" in shown  # as many distinct tokens
    assert "3 short ones after them" in shown
