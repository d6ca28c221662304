"""Several answers on one lease: all at once where there is room, in turns where there is not, and one lease in all."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from modelyard.core.errors import Cancelled, Internal
from modelyard.core.events import Event, Failed, Finished, collect_reply
from modelyard.core.request import Sampling
from tests.gateway.harness import GatewayHarness, until


async def by_choice(answer: Any) -> dict[int, list[Event]]:
    heard: dict[int, list[Event]] = defaultdict(list)
    async with asyncio.timeout(60):
        async for choice, events in answer:
            heard[choice] += events
    return heard


async def test_all_run_at_once_where_there_is_room_and_the_lease_goes_back_with_the_last() -> None:
    async with GatewayHarness(places=4) as stage:
        answer = await stage.start(n=3)
        assert stage.running == 3
        reading = asyncio.create_task(by_choice(answer))
        await stage.job(2)
        for number in (2, 0, 1):
            assert stage.running == 3
            stage.engine.jobs[number].whole(f"Answer {number}.")
            await until(lambda: len(stage.engine.jobs) == 3)
        heard = await reading
        assert [collect_reply(heard[choice]).text for choice in range(3)] == ["Answer 0.", "Answer 1.", "Answer 2."]
        answer.close()
        await until(lambda: stage.running == 0)


async def test_on_a_narrower_lease_they_take_turns() -> None:
    async with GatewayHarness(places=2) as stage:
        answer = await stage.start(n=5)
        assert stage.running == 2
        reading = asyncio.create_task(by_choice(answer))
        for number in range(5):
            play = await stage.job(number)
            assert sum(not job.closed for job in stage.engine.jobs) <= 2
            play.whole(f"Answer {number}.")
        heard = await reading
        assert sorted(heard) == list(range(5))
        assert all(isinstance(events[-1], Finished) for events in heard.values())
        await until(lambda: stage.running == 0)


@pytest.mark.parametrize("n", [3, 5, 9])
async def test_cancelled_while_most_stand_in_line_each_ends_in_one_failure(n: int) -> None:
    async with GatewayHarness(places=2) as stage:
        answer = await stage.start(n=n)
        reading = asyncio.create_task(by_choice(answer))
        await stage.job(1)
        answer.cancel()
        assert [job.is_cancelled for job in stage.engine.jobs] == [True, True]
        for job in stage.engine.jobs:
            job.end("cancelled")
        heard = await reading
        assert sorted(heard) == list(range(n))
        assert all([type(e.error) for e in events if isinstance(e, Failed)] == [Cancelled] for events in heard.values())
        assert len(stage.engine.jobs) == 2
        await until(lambda: stage.running == 0)


async def test_cancelled_in_the_queue_none_reaches_the_engine() -> None:
    async with GatewayHarness(places=1) as stage:
        holder, waiter = await stage.start(), await stage.start(n=3)
        reading = asyncio.create_task(by_choice(waiter))
        await until(lambda: stage.waiting == 1)
        waiter.cancel()
        assert sorted(await reading) == [0, 1, 2]
        assert (stage.waiting, stage.engine.jobs) == (0, [])
        holder.close()


async def test_one_that_fails_leaves_the_others_alone() -> None:
    async with GatewayHarness() as stage:
        answer = await stage.start(n=2)
        reading = asyncio.create_task(by_choice(answer))
        await stage.job(1)
        stage.engine.jobs[0].end("error", Internal("broken", id="x"))
        stage.engine.jobs[1].whole("Fine.")
        heard = await reading
        assert heard[0][-1] == Failed(Internal("broken", id="x"))
        assert collect_reply(heard[1]).text == "Fine."
        await until(lambda: stage.running == 0)


async def test_never_read_it_gives_its_lease_back() -> None:
    async with GatewayHarness() as stage:
        answer = await stage.start(n=3)
        answer.close()
        assert stage.running == 0


async def test_closed_before_its_tasks_began_it_gives_its_lease_back() -> None:
    async with GatewayHarness() as stage:
        answer = await stage.start(n=3)
        reading = answer.__anext__()
        reading.send(None)  # the tasks are made, and none has had its turn
        answer.close()
        reading.close()
        await until(lambda: stage.running == 0)
        assert stage.engine.jobs == []


async def test_a_reader_that_leaves_in_mid_stream_frees_the_places_when_the_engine_has() -> None:
    async with GatewayHarness(places=2) as stage:
        answer = await stage.start(n=3)
        reading = asyncio.create_task(anext(answer))
        for number in range(2):
            (await stage.job(number)).accept()
        await reading
        answer.close()
        await until(lambda: all(job.is_cancelled for job in stage.engine.jobs))
        assert stage.running == 2
        for job in stage.engine.jobs:
            job.end("cancelled")
        await until(lambda: stage.running == 0)
        assert len(stage.engine.jobs) == 2


async def test_seeded_answers_differ() -> None:
    async with GatewayHarness() as stage:
        answer = await stage.start(n=3, sampling=Sampling(seed=1))
        reading = asyncio.create_task(by_choice(answer))
        await stage.job(2)
        assert sorted(job.prompt.sampling.seed or 0 for job in stage.engine.jobs) == [1, 2, 3]
        for job in stage.engine.jobs:
            job.whole()
        await reading
