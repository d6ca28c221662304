"""Load on a ChatEngine: the scripted one, event by event."""

from __future__ import annotations

from modelyard.benchmark.chat_load import ChatLoad
from modelyard.benchmark.lanes import Extent, play
from modelyard.benchmark.workload import named
from tests.benchmark.fakes import engine

CHAT = named("chat", prompt_tokens=60, output_tokens=12)


async def test_a_conversation_of_events_is_measured_as_any_other() -> None:
    async with engine([{"think": "Hm."}, {"tokens": 8}], kind="chat") as running:
        found = await play(ChatLoad(running, "demo"), CHAT, Extent(conversations=2), streams=3)
    assert len(found.good) == 6
    assert all(sample.output_tokens > 0 and sample.ttft_s is not None for sample in found.samples)


async def test_prompts_come_near_the_wanted_length_once_it_has_learned() -> None:
    async with engine([{"tokens": 8}], kind="chat") as running:
        load = ChatLoad(running, "demo")
        samples = (await play(load, CHAT, Extent(conversations=20), streams=1)).samples
    assert samples[0].prompt_tokens > 0
    assert abs(sum(s.prompt_tokens for s in samples[5:]) / 15 - 60) < 12


async def test_turns_grow_by_what_was_said() -> None:
    agent = named("agent", prompt_tokens=60, turn_tokens=20, output_tokens=5, turns=3)
    async with engine([{"tokens": 5}], kind="chat") as running:
        lengths = [s.prompt_tokens for s in (await play(ChatLoad(running, "demo"), agent)).samples]
    assert lengths[0] < lengths[1] < lengths[2]


async def test_a_failure_in_the_middle_is_a_sample_with_its_error() -> None:
    async with engine([{"tokens": 3}, {"fail": "out of memory"}], kind="chat") as running:
        (sample,) = (await play(ChatLoad(running, "demo"), CHAT)).samples
    assert sample.error == "out of memory"


async def test_an_engine_that_hangs_is_left_after_the_time_limit() -> None:
    async with engine([{"hang": True}], kind="chat") as running:
        (sample,) = (await play(ChatLoad(running, "demo", limit_s=0.05), CHAT)).samples
        assert sample.error == "not finished within 0.05 s"
        assert running.stats().running == 0
