"""Cycles of loading and unloading: each engine returns what it took, and growth is noticed."""

from __future__ import annotations

import pytest

from bench.cycles import CycleRun, model_configs, run_cycles
from bench.resources import Usage, draw_series, slope
from bench.servers import modelyard_server
from modelyard_bench.drawing import svg
from tests.engines.ct2.helpers import tiny_folder
from tests.engines.llama_cpp.short_model import short_model_file


@pytest.mark.parametrize(("engine", "cycles"), [("fake", 4), ("ct2", 2), ("llama_cpp", 1), ("openai_remote", 2)])
def test_memory_files_and_threads_stay_flat(engine: str, cycles: int) -> None:
    with modelyard_server({"models": {"upstream": {"backend": "fake", "token_delay": 0}}}) as upstream:
        models = model_configs(short_model_file(), tiny_folder(), f"{upstream.url}/v1")
        run = run_cycles(engine, models[engine], cycles, warmup=1)
    assert len(run.samples) == 1 + cycles
    assert run.is_flat, run.samples


def test_growth_is_not_flat() -> None:
    def run(*samples: Usage) -> CycleRun:
        return CycleRun("e", samples, 1.0, warmup=1)

    base = Usage(100.0, 15, 3, 1)
    assert run(Usage(50.0, 9, 2, 1), base, base).is_flat, "the warm-up does not count"
    for worse in (Usage(130.0, 15, 3, 1), Usage(100.0, 30, 3, 1), Usage(100.0, 15, 13, 1), Usage(100.0, 15, 3, 11)):
        assert not run(base, base, worse).is_flat, worse
    assert run(*(Usage(float(mb), 15, 3, 1) for mb in range(100, 120, 2))).slope_kb == pytest.approx(2048)
    slow_leak = run(*(Usage(100 + number * 14 / 1024, 15, 3, 1) for number in range(201)))
    assert not slow_leak.is_flat, "14 KiB per cycle are 3 MiB at the end"


def test_a_slope_is_per_unit_and_a_drawing_has_a_panel_for_each_series() -> None:
    assert slope([0, 10, 20], [5.0, 7.0, 9.0]) == pytest.approx(0.2)
    assert slope([1], [5.0]) == 0
    drawn = svg(draw_series("Memory", "s", [0, 1, 2], {"RSS": [1.0, 2.0, 3.0], "files": [9, 9, 9]}))
    assert all(word in drawn for word in ("Memory", "RSS", "files", "max 3", "last 9"))
