"""Several choices on one lease: in parallel with enough slots, otherwise one after the other."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from modelyard.core.errors import Cancelled, Internal
from modelyard.core.events import Event, Failed, Finished, collect_reply
from modelyard.core.request import Sampling
from tests.gateway.harness import GatewayHarness, wait_until


async def by_choice(stream: Any) -> dict[int, list[Event]]:
    collected: dict[int, list[Event]] = defaultdict(list)
    async with asyncio.timeout(60):
        async for choice, events in stream:
            collected[choice] += events
    return collected


async def test_choices_run_in_parallel_and_the_last_one_releases_the_lease() -> None:
    async with GatewayHarness(slots=4) as harness:
        stream = await harness.start(n=3)
        assert harness.running == 3
        reading = asyncio.create_task(by_choice(stream))
        await harness.generation(2)
        for index in (2, 0, 1):
            assert harness.running == 3
            harness.engine.generations[index].finish(f"Answer {index}.")
            await wait_until(lambda: len(harness.engine.generations) == 3)
        events = await reading
        assert [collect_reply(events[choice]).text for choice in range(3)] == ["Answer 0.", "Answer 1.", "Answer 2."]
        stream.close()
        await wait_until(lambda: harness.running == 0)


async def test_choices_take_turns_on_a_lease_with_fewer_slots() -> None:
    async with GatewayHarness(slots=2) as harness:
        stream = await harness.start(n=5)
        assert harness.running == 2
        reading = asyncio.create_task(by_choice(stream))
        for index in range(5):
            generation = await harness.generation(index)
            assert sum(not generation.closed for generation in harness.engine.generations) <= 2
            generation.finish(f"Answer {index}.")
        events = await reading
        assert sorted(events) == list(range(5))
        assert all(isinstance(events[-1], Finished) for events in events.values())
        await wait_until(lambda: harness.running == 0)


@pytest.mark.parametrize("n", [3, 5, 9])
async def test_a_cancel_ends_running_and_waiting_choices_with_one_failure_each(n: int) -> None:
    async with GatewayHarness(slots=2) as harness:
        stream = await harness.start(n=n)
        reading = asyncio.create_task(by_choice(stream))
        await harness.generation(1)
        stream.cancel()
        assert [generation.is_cancelled for generation in harness.engine.generations] == [True, True]
        for generation in harness.engine.generations:
            generation.end("cancelled")
        events = await reading
        assert sorted(events) == list(range(n))
        assert all(
            [type(e.error) for e in events if isinstance(e, Failed)] == [Cancelled] for events in events.values()
        )
        assert len(harness.engine.generations) == 2
        await wait_until(lambda: harness.running == 0)


async def test_choices_cancelled_in_the_queue_never_reach_the_engine() -> None:
    async with GatewayHarness(slots=1) as harness:
        holder, waiter = await harness.start(), await harness.start(n=3)
        reading = asyncio.create_task(by_choice(waiter))
        await wait_until(lambda: harness.waiting == 1)
        waiter.cancel()
        assert sorted(await reading) == [0, 1, 2]
        assert (harness.waiting, harness.engine.generations) == (0, [])
        holder.close()


async def test_a_failed_choice_does_not_affect_the_others() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start(n=2)
        reading = asyncio.create_task(by_choice(stream))
        await harness.generation(1)
        harness.engine.generations[0].end("error", Internal("broken", id="x"))
        harness.engine.generations[1].finish("Fine.")
        events = await reading
        assert events[0][-1] == Failed(Internal("broken", id="x"))
        assert collect_reply(events[1]).text == "Fine."
        await wait_until(lambda: harness.running == 0)


async def test_a_stream_that_is_never_read_releases_its_lease() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start(n=3)
        stream.close()
        assert harness.running == 0


async def test_a_stream_closed_before_its_tasks_run_releases_its_lease() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start(n=3)
        reading = stream.__anext__()
        reading.send(None)  # the tasks exist, and none has run yet
        stream.close()
        reading.close()
        await wait_until(lambda: harness.running == 0)
        assert harness.engine.generations == []


async def test_closing_a_running_stream_frees_the_slots_when_the_engine_ends() -> None:
    async with GatewayHarness(slots=2) as harness:
        stream = await harness.start(n=3)
        reading = asyncio.create_task(anext(stream))
        for index in range(2):
            (await harness.generation(index)).accept()
        await reading
        stream.close()
        await wait_until(lambda: all(generation.is_cancelled for generation in harness.engine.generations))
        assert harness.running == 2
        for generation in harness.engine.generations:
            generation.end("cancelled")
        await wait_until(lambda: harness.running == 0)
        assert len(harness.engine.generations) == 2


async def test_choices_have_different_seeds() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start(n=3, sampling=Sampling(seed=1))
        reading = asyncio.create_task(by_choice(stream))
        await harness.generation(2)
        assert sorted(generation.prompt.sampling.seed or 0 for generation in harness.engine.generations) == [1, 2, 3]
        for generation in harness.engine.generations:
            generation.finish()
        await reading
