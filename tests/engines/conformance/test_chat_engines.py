"""What every chat engine does with a request: the contract of its events, its ends, and its life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from modelyard.core.engine import ChatEngine, Generation
from modelyard.core.errors import Cancelled, Unavailable
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started, collect_reply
from modelyard.core.request import Message, Request, Sampling, Text
from tests.engines.conformance.abilities import assert_declared
from tests.engines.conformance.chat_subjects import CHAT_SUBJECTS, MARKED, ChatSubject

ENDLESS = "Endless counting, please: one, two, three, four"
NO_END = Sampling(temperature=0, logit_bias={0: -100.0, 2: -100.0})  # a real model's tokens that would end its turn


@pytest.fixture(params=[pytest.param(name, marks=MARKED.get(name, ())) for name in CHAT_SUBJECTS])
def subject(request: pytest.FixtureRequest) -> ChatSubject:
    return CHAT_SUBJECTS[request.param]


@pytest.fixture
async def opened(subject: ChatSubject) -> AsyncIterator[ChatEngine]:
    async with subject.made() as engine:
        await engine.open(lambda *_: None)
        yield engine
        await engine.close()


def asked(text: str = "Hello there, friend.", **fields: object) -> Request:
    chosen = {"sampling": Sampling(temperature=0), "max_tokens": 8, **fields}
    return Request(model="demo", messages=(Message("user", (Text(text),)),), **chosen)  # type: ignore[arg-type]


def endless() -> Request:
    """An answer that is not over before somebody ends it."""
    return asked(ENDLESS, max_tokens=1900, sampling=NO_END)


async def read(generation: Generation[Event]) -> list[Event]:
    return [event async for batch in generation for event in batch]


async def until(generation: Generation[Event], kind: type) -> list[Event]:
    got: list[Event] = []
    while not any(isinstance(event, kind) for event in got):
        got += await anext(generation)
    return got


async def test_it_promises_no_more_than_its_module_declares(subject: ChatSubject) -> None:
    async with subject.made() as engine:
        assert_declared(engine.info)
        await engine.close()


async def test_its_events_keep_their_contract_and_fold_to_a_reply(opened: ChatEngine) -> None:
    assert isinstance(opened, ChatEngine)
    events = await read(opened.chat(asked()))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Started | Finished | Failed) for event in events) == 2
    opens = [event.index for event in events if isinstance(event, BlockStart)]
    closes = [event.index for event in events if isinstance(event, BlockEnd)]
    assert opens == closes == list(range(len(opens)))
    assert collect_reply(events).text
    assert opened.stats().running == 0


async def test_usage_is_true(opened: ChatEngine, subject: ChatSubject) -> None:
    reply = collect_reply(await read(opened.chat(asked(max_tokens=3, sampling=NO_END))))
    assert reply.finished.reason == "max_tokens"
    assert reply.finished.usage.output == 3
    assert reply.finished.usage.prompt > 3
    counted = await opened.count(asked(max_tokens=3))
    assert counted == (reply.finished.usage.prompt if subject.counts else None)


async def test_an_answer_is_heard_before_it_is_over(opened: ChatEngine) -> None:
    generation = opened.chat(endless())
    assert not any(isinstance(event, Finished) for event in await until(generation, BlockDelta))
    generation.cancel()
    await read(generation)


async def test_two_at_a_time_do_not_meet(opened: ChatEngine, subject: ChatSubject) -> None:
    texts = ("The first one is about rivers.", "A second one, about mountains.")
    alone = [collect_reply(await read(opened.chat(asked(text)))).text for text in texts]
    generations = [opened.chat(asked(text)) for text in texts]
    together = [collect_reply(await read(generation)).text for generation in generations]
    assert len(set(together)) == 2
    if subject.exact:
        assert together == alone


async def test_a_cancelled_answer_ends_once_and_its_place_is_free(opened: ChatEngine) -> None:
    for kind in (None, Started, BlockDelta):
        generation = opened.chat(endless())
        got = await until(generation, kind) if kind is not None else []
        generation.cancel()
        generation.cancel()
        got += await read(generation)
        assert isinstance(got[-1], Failed)
        assert isinstance(got[-1].error, Cancelled)
        assert opened.stats().running == 0
    assert collect_reply(await read(opened.chat(asked()))).text


async def test_closing_ends_what_runs_and_refuses_what_comes(opened: ChatEngine) -> None:
    generation = opened.chat(endless())
    await until(generation, Started)
    await opened.close()
    for events in (await read(generation), await read(opened.chat(asked()))):
        last = events[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Unavailable)
    assert not opened.lost.done()


async def test_it_closes_twice_and_unopened(subject: ChatSubject) -> None:
    async with subject.made() as engine:
        await engine.close()
        await engine.close()


async def test_opening_tells_its_progress_and_can_be_given_up(subject: ChatSubject) -> None:
    async with subject.made() as engine:
        told: list[float] = []
        await engine.open(lambda done, _: told.append(done))
        assert told == sorted(told)
        assert told[-1] == 1.0
        await engine.close()
    async with subject.made() as engine:
        task = asyncio.create_task(engine.open(lambda *_: None))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
