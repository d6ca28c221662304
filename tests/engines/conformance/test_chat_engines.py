"""Every chat engine keeps the contract of events, ends and life cycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio

from modelyard.core.engine import ChatEngine, Generation
from modelyard.core.errors import Cancelled, Unavailable
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started, collect_reply
from modelyard.core.request import Message, Request, Sampling, Text
from tests.engines.conformance.chat_subjects import CHAT_SUBJECTS, MARKED, ChatSubject
from tests.engines.conformance.subjects import assert_declared

pytestmark = pytest.mark.asyncio(loop_scope="package")

UNLIMITED_TEXT = "Endless counting, please: one, two, three, four"
NO_END = Sampling(temperature=0, logit_bias={0: -100.0, 2: -100.0})  # the end-of-turn tokens of the real model


@pytest.fixture(params=[pytest.param(name, marks=MARKED.get(name, ())) for name in CHAT_SUBJECTS])
def subject(request: pytest.FixtureRequest) -> ChatSubject:
    return CHAT_SUBJECTS[request.param]


class SharedChatEngine:
    """The open engine of one subject at a time."""

    def __init__(self) -> None:
        self._subject: ChatSubject | None = None
        self._stack = AsyncExitStack()
        self._engine: ChatEngine | None = None

    async def get(self, subject: ChatSubject) -> ChatEngine:
        if subject is not self._subject or self._engine is None or self._engine.lost.done():
            await self._stack.aclose()
            self._engine = await self._stack.enter_async_context(open_engine(subject))
            self._subject = subject
        return self._engine

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def open_engine(subject: ChatSubject) -> AsyncIterator[ChatEngine]:
    async with subject.create() as engine:
        await engine.open(lambda *_: None)
        try:
            yield engine
        finally:
            await engine.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_chat_engine() -> AsyncIterator[SharedChatEngine]:
    shared = SharedChatEngine()
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="package")
async def opened(subject: ChatSubject, shared_chat_engine: SharedChatEngine) -> ChatEngine:
    return await shared_chat_engine.get(subject)


def request(text: str = "Hello there, friend.", **fields: object) -> Request:
    defaults = {"sampling": Sampling(temperature=0), "max_tokens": 8}
    return Request(model="demo", messages=(Message("user", (Text(text),)),), **defaults | fields)  # type: ignore[arg-type]


def unlimited() -> Request:
    """The answer does not end before it is cancelled."""
    return request(UNLIMITED_TEXT, max_tokens=1900, sampling=NO_END)


async def read(generation: Generation[Event]) -> list[Event]:
    return [event async for batch in generation for event in batch]


async def until(generation: Generation[Event], kind: type) -> list[Event]:
    got: list[Event] = []
    while not any(isinstance(event, kind) for event in got):
        got += await anext(generation)
    return got


async def test_engine_claims_no_more_than_its_module_declares(subject: ChatSubject) -> None:
    async with subject.create() as engine:
        assert_declared(engine.info)
        await engine.close()


async def test_events_keep_their_order_and_build_a_reply(opened: ChatEngine) -> None:
    assert isinstance(opened, ChatEngine)
    events = await read(opened.chat(request()))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Started | Finished | Failed) for event in events) == 2
    opens = [event.index for event in events if isinstance(event, BlockStart)]
    closes = [event.index for event in events if isinstance(event, BlockEnd)]
    assert opens == closes == list(range(len(opens)))
    assert collect_reply(events).text
    assert opened.stats().running == 0


async def test_usage_is_correct(opened: ChatEngine, subject: ChatSubject) -> None:
    reply = collect_reply(await read(opened.chat(request(max_tokens=3, sampling=NO_END))))
    assert reply.finished.reason == "max_tokens"
    assert reply.finished.usage.output == 3
    assert reply.finished.usage.prompt > 3
    counted = await opened.count(request(max_tokens=3))
    assert counted == (reply.finished.usage.prompt if subject.counts else None)


async def test_answer_is_streamed(opened: ChatEngine) -> None:
    generation = opened.chat(unlimited())
    assert not any(isinstance(event, Finished) for event in await until(generation, BlockDelta))
    generation.cancel()
    await read(generation)


async def test_concurrent_answers_do_not_mix(opened: ChatEngine, subject: ChatSubject) -> None:
    texts = ("The first one is about rivers.", "A second one, about mountains.")
    alone = [collect_reply(await read(opened.chat(request(text)))).text for text in texts]
    generations = [opened.chat(request(text)) for text in texts]
    together = [collect_reply(await read(generation)).text for generation in generations]
    assert len(set(together)) == 2
    if subject.is_exact:
        assert together == alone


async def test_cancelled_answer_ends_once_and_frees_its_slot(opened: ChatEngine) -> None:
    for kind in (None, Started, BlockDelta):
        generation = opened.chat(unlimited())
        got = await until(generation, kind) if kind is not None else []
        generation.cancel()
        generation.cancel()
        got += await read(generation)
        assert isinstance(got[-1], Failed)
        assert isinstance(got[-1].error, Cancelled)
        assert opened.stats().running == 0
    assert collect_reply(await read(opened.chat(request()))).text


async def test_close_fails_running_and_later_requests(subject: ChatSubject) -> None:
    async with open_engine(subject) as engine:
        generation = engine.chat(unlimited())
        await until(generation, Started)
        await engine.close()
        for events in (await read(generation), await read(engine.chat(request()))):
            last = events[-1]
            assert isinstance(last, Failed)
            assert isinstance(last.error, Unavailable)
        assert not engine.lost.done()


async def test_engine_can_be_closed_twice_and_unopened(subject: ChatSubject) -> None:
    async with subject.create() as engine:
        await engine.close()
        await engine.close()


async def test_load_reports_progress_and_can_be_cancelled(subject: ChatSubject) -> None:
    async with subject.create() as engine:
        reports: list[float] = []
        await engine.open(lambda done, _: reports.append(done))
        assert reports == sorted(reports)
        assert reports[-1] == 1.0
        await engine.close()
    async with subject.create() as engine:
        task = asyncio.create_task(engine.open(lambda *_: None))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
