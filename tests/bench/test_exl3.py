"""The comparison with ExLlamaV3's own generator: its figures, and a run of its paths on the fake library."""

from __future__ import annotations

import os

from bench import exl3
from modelyard.core.engine import CacheInfo
from tests.engines.exllamav3.helpers import running


def test_a_rate_counts_tokens_while_all_streams_run() -> None:
    one = [(float(at), 1) for at in range(11)]
    two = [(float(at), 1) for at in range(5, 20)]
    assert exl3.tokens_per_s([one, two]) == 2.0


def test_every_path_comes_first_in_some_round() -> None:
    names = ["direct", "in process", "child"]
    orders = [exl3.rotated(names, number) for number in range(6)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == set(names)


def test_threads_of_a_process_are_counted_by_the_kernel() -> None:
    cost = exl3.thread_cost(os.getpid(), exl3.thread_times(os.getpid()), 1)
    assert cost.startswith("engine ")
    assert "; loop " in cost


async def test_the_generator_is_driven_directly_and_through_our_engine() -> None:
    async with running({"main": CacheInfo(1024, 2)}) as engine:
        for path in (exl3.direct_path(engine), exl3.engine_path(engine)):
            times = await path(2, 20)
            assert [sum(count for _, count in stream) for stream in times] == [20, 20]
        assert engine._model is not None
        engine._model.library.torch.cuda.synchronize = lambda *_: None  # the fake library has no GPU to wait for
        with exl3.StepProfile(engine) as profile:
            await exl3.engine_path(engine)(1, 30)
        assert len(profile.steps) >= 15
        assert str(profile).startswith("step ")
