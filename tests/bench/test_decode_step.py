"""The share of Python in a decode step: steps are measured correctly, and a run leaves the library unchanged."""

from __future__ import annotations

import pytest

from bench.decode_step import StepTime, measure, submit_ahead, summarize, tiny_model
from modelyard.core.request import Sampling
from tests.engines.llama_cpp.exact_models import exact_model


def test_the_cost_is_the_median_of_the_steps_in_which_all_streams_ran() -> None:
    steps = [
        StepTime(2, 0.010, 0.001, 0.001),
        StepTime(2, 0.020, 0.002, 0.001),
        StepTime(2, 9.0, 8.99, 0.003),
        StepTime(1, 9.0, 9.0, 9.0),
    ]
    found = summarize(2, steps)
    assert (found.streams, found.steps) == (2, 3)
    assert found.wall == 0.020
    assert (found.python, found.cpu) == (0.002, 0.001)
    assert found.python_share == pytest.approx(0.1)


async def test_a_run_counts_each_step_and_leaves_the_library_unchanged() -> None:
    from modelyard.engines.llama_cpp import binding, context

    before = binding.lib.llama_decode, dict(vars(binding.short)), context.LlamaContext.step
    found = await measure(exact_model(), threads=1, streams=1, tokens=6, sampling=Sampling(temperature=0))
    assert found.steps == 5  # the first token comes with the prompt
    assert 0 < found.python < found.wall
    assert (binding.lib.llama_decode, dict(vars(binding.short)), context.LlamaContext.step) == before


async def test_a_step_submitted_ahead_shows_how_long_a_gpu_would_wait() -> None:
    with submit_ahead(), tiny_model() as file:
        found = await measure(file, threads=1, streams=2, tokens=8, sampling=Sampling(temperature=0))
    assert found.steps >= 5
    assert found.waits > 0
    assert not file.exists()
