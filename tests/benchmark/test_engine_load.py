"""Load on a TextEngine: the scripted one, token by token."""

from __future__ import annotations

import asyncio

import pytest

from modelyard.benchmark.engine_load import EngineLoad
from modelyard.benchmark.lanes import Extent, play
from modelyard.benchmark.workload import named
from tests.benchmark.fakes import engine, vocabulary

CHAT = named("chat", prompt_tokens=50, output_tokens=12)


async def test_prompts_and_answers_have_exactly_the_wanted_length() -> None:
    async with engine([{"tokens": 100}]) as running:
        found = await play(EngineLoad(running, vocabulary()), CHAT, Extent(conversations=3), streams=4)
    assert len(found.samples) == 12
    assert {(s.prompt_tokens, s.output_tokens, s.error) for s in found.samples} == {(50, 12, None)}
    assert not any(sample.is_counted for sample in found.samples)
    assert all(sample.ttft_s is not None and sample.ttft_s <= sample.total_s for sample in found.samples)


async def test_every_token_after_the_first_batch_has_its_gap() -> None:
    async with engine([{"tokens": 4}, {"delay": 0.01}, {"tokens": 100}]) as running:
        (sample,) = (await play(EngineLoad(running, vocabulary()), CHAT)).samples
    assert sample.output_tokens == 12
    assert len(sample.gaps_s) == 8
    assert sample.ttft_s is not None
    assert sample.ttft_s + sum(sample.gaps_s) <= sample.total_s


async def test_each_turn_finds_the_turns_before_it_in_the_cache() -> None:
    agent = named("agent", prompt_tokens=100, turn_tokens=20, output_tokens=5, turns=3)
    async with engine([{"tokens": 100}]) as running:
        samples = (await play(EngineLoad(running, vocabulary(), cache="main"), agent)).samples
    assert [sample.prompt_tokens for sample in samples] == [100, 125, 150]
    first, second, third = (sample.cached_tokens for sample in samples)
    assert (first, second) < (100, 125)
    assert first == 0
    assert second >= 100
    assert third >= 125


async def test_a_second_conversation_finds_nothing() -> None:
    async with engine([{"tokens": 100}]) as running:
        load = EngineLoad(running, vocabulary())
        samples = (await play(load, CHAT, Extent(conversations=4), streams=1)).samples
    assert max(sample.cached_tokens for sample in samples) <= 6  # a digit or two of the number in front


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([{"tokens": 3}, {"fail": "out of memory", "kind": "unavailable"}], "out of memory"),
        ([{"fail": "no room", "kind": "overloaded"}], "no room"),
        ([{"tokens": 2}, {"die": "segmentation fault"}], "segmentation fault"),
    ],
)
async def test_a_job_that_fails_is_a_sample_with_its_error(steps: list[dict[str, object]], error: str) -> None:
    async with engine(steps) as running:
        (sample,) = (await play(EngineLoad(running, vocabulary()), CHAT)).samples
    assert sample.error == error


async def test_a_prompt_too_long_for_the_window_is_an_error_of_its_sample() -> None:
    async with engine([{"tokens": 3}], window=40) as running:
        (sample,) = (await play(EngineLoad(running, vocabulary()), CHAT)).samples
    assert sample.error == "the prompt has 50 tokens and the window only 40"


async def test_a_cache_that_is_not_there_is_an_error_of_its_sample() -> None:
    async with engine([{"tokens": 3}]) as running:
        (sample,) = (await play(EngineLoad(running, vocabulary(), cache="big"), CHAT)).samples
    assert sample.error == "the engine has no cache 'big'; it has main"


async def test_an_engine_that_hangs_is_left_after_the_time_limit_and_its_place_is_free() -> None:
    async with engine([{"text": "a"}, {"hang": True}]) as running:
        (sample,) = (await play(EngineLoad(running, vocabulary(), limit_s=0.05), CHAT)).samples
        assert sample.error == "not finished within 0.05 s"
        assert running.stats().running == 0


async def test_whoever_cancels_the_load_cancels_the_job() -> None:
    async with engine([{"hang": True}]) as running:
        task = asyncio.create_task(play(EngineLoad(running, vocabulary()), CHAT))
        async with asyncio.timeout(60):
            while not running.stats().running:  # noqa: ASYNC110  the engine only counts
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while running.stats().running:  # noqa: ASYNC110
                await asyncio.sleep(0)


def test_a_load_is_called_as_its_engine_unless_it_is_given_a_name() -> None:
    class Info:
        backend = "fake"

    class Engine:
        info = Info()

    assert EngineLoad(Engine(), vocabulary()).name == "fake"  # type: ignore[arg-type]
    assert EngineLoad(Engine(), vocabulary(), name="mine").name == "mine"  # type: ignore[arg-type]
