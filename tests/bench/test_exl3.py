"""The comparison with ExLlamaV3's own generator: its figures, and the stand-in whose steps take a fixed time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import exl3, paced
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.engines import exllamav3
from modelyard.engines.exllamav3.engine import ExllamaEngine
from modelyard.engines.exllamav3.model import ExllamaLibrary
from tests.engines.exllamav3.helpers import write_model


def test_a_rate_is_of_the_time_in_which_all_streams_run() -> None:
    one = [(float(at), 1) for at in range(11)]
    two = [(float(at), 1) for at in range(5, 20)]
    assert exl3.rate([one, two]) == 2.0


def test_the_ratio_of_medians_lies_within_its_interval() -> None:
    told = exl3.of_medians([90.0, 95.0, 100.0], [100.0, 100.0, 200.0])
    assert told.low <= told.middle == 0.95 <= told.high


def test_every_way_has_every_turn() -> None:
    names = ["direct", "inline", "process"]
    orders = [exl3._order(names, number) for number in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)


def test_threads_of_a_process_are_counted_by_the_kernel() -> None:
    told = exl3.spent(os.getpid(), exl3.threads(os.getpid()), 1)
    assert told.startswith("engine ")
    assert "; loop " in told


async def test_the_stand_in_drives_our_engine_and_is_driven_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paced._PACE, "1e-6")
    monkeypatch.setattr(paced, "LAUNCHES", 1)
    options = exllamav3.Options(path=str(write_model(tmp_path / "model")))
    spec = EngineSpec("bench", options, {"main": CacheInfo(exl3.WINDOW, 2)})
    engine = ExllamaEngine(spec, lambda: ExllamaLibrary(paced, paced.Torch))
    try:
        await engine.open(lambda *_: None)
        for way in (exl3.directly(engine), exl3.through(engine)):
            heard = await way(2, 20)
            assert [sum(count for _, count in times) for times in heard] == [20, 20]
        with exl3.Stopwatch(engine) as watch:
            await exl3.through(engine)(1, 30)
        assert len(watch.steps) == 30
        assert str(watch).startswith("step ")
    finally:
        await engine.close()
