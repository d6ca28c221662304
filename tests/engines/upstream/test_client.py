"""The HTTP client of forwarding engines, over a real socket: streams, refusals, second tries, and leaving early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from modelyard.engines.upstream.retry import Patience

from modelyard.core.errors import (
    ContextOverflow,
    Incomplete,
    Internal,
    InvalidRequest,
    ModelyardError,
    Overloaded,
    RateLimited,
    Timeout,
    Unavailable,
)
from modelyard.core.events import BlockDelta, Event, Failed, Finished
from modelyard.core.protocol import WireProtocol
from modelyard.engines.upstream.client import Client, Place, with_fields
from modelyard.protocols import openai_chat
from tests.engines.upstream.fake_upstream import Answer, FakeUpstream, chat_stream, error_answer, fake_upstream

WIRE = cast(WireProtocol, openai_chat)


class Ear:
    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.first = asyncio.Event()

    async def say(self, events: Sequence[Event]) -> bool:
        self.heard += events
        if self.text:
            self.first.set()
        return isinstance(self.heard[-1], Finished | Failed)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.heard if isinstance(event, BlockDelta))


def client(at: FakeUpstream, patience: Patience = Patience(), **place: Any) -> Client:
    return Client(Place(name="the upstream", base_url=at.url, **{"timeout": 60.0} | place), patience)


async def asked(at: FakeUpstream, patience: Patience = Patience(), **place: Any) -> Ear:
    ear, it = Ear(), client(at, patience, **place)
    try:
        await it.stream("/chat/completions", b'{"model":"m"}', WIRE, ear.say)
    finally:
        await it.close()
    return ear


async def test_a_stream_is_told_as_events_and_asked_for_with_its_headers() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi", " you"))) as it:
        ear = await asked(it, headers={"authorization": "Bearer k"})
    assert ear.text == "Hi you"
    assert isinstance(ear.heard[-1], Finished)
    (request,) = it.asked
    assert (request.method, request.path, request.body) == ("POST", "/chat/completions", {"model": "m"})
    assert request.headers["authorization"] == "Bearer k"


async def test_a_connection_is_used_again_after_an_answer_that_was_read() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi"))) as it:
        same = client(it)
        for _ in range(3):
            await same.stream("/x", b"{}", WIRE, Ear().say)
        await same.close()
    assert (len(it.asked), it.connections) == (3, 1)


async def test_an_end_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi"), hangs=True)) as it:
        ear = await asked(it)
        await it.gone.wait()
    assert isinstance(ear.heard[-1], Finished)


async def test_a_reply_that_came_whole_is_told_all_the_same() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}
    body = json.dumps({"id": "1", "model": "m", "choices": [choice]}).encode()
    async with fake_upstream(Answer(body=[body], headers={"content-type": "application/json"})) as it:
        assert (await asked(it)).text == "whole"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (error_answer(400), InvalidRequest),
        (
            error_answer(
                400, message="This model's maximum context length is 10 tokens. However, it resulted in 20 tokens"
            ),
            ContextOverflow,
        ),
        (error_answer(401), Unavailable),
        (error_answer(403), Unavailable),
        (error_answer(429, {"retry-after": "9"}), RateLimited),
        (error_answer(500), Internal),
        (error_answer(503), Unavailable),
        (error_answer(504), Timeout),
        (error_answer(529), Overloaded),
        (Answer(502, [b"<html>bad gateway</html>"]), Unavailable),
    ],
)
async def test_a_refusal_keeps_its_meaning(answer: Answer, kind: type[ModelyardError]) -> None:
    async with fake_upstream(answer) as it:
        with pytest.raises(kind) as caught:
            await asked(it)
    assert len(it.asked) == 1
    if kind is RateLimited:
        assert caught.value.retry_after == 9.0


async def test_a_place_where_nobody_listens_is_named() -> None:
    async with fake_upstream() as it:
        pass
    with pytest.raises(Unavailable, match="the upstream cannot be reached"):
        await asked(it)


async def test_silence_ends_in_a_timeout() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1], hangs=True)) as it:
        with pytest.raises(Timeout, match="silent"):
            await asked(it, timeout=0.05)


async def test_a_connection_that_breaks_off_in_the_answer_is_an_error() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1], breaks=True)) as it:
        with pytest.raises(Unavailable, match="broke the connection off"):
            await asked(it, Patience(3))
    assert len(it.asked) == 1, "there was a first byte: no second try"


async def test_a_stream_that_just_ends_is_incomplete() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1])) as it:
        (last,) = (await asked(it)).heard[-1:]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


async def test_what_was_refused_before_its_first_byte_is_tried_again_when_the_upstream_says() -> None:
    busy = error_answer(429, {"retry-after": "0"})
    async with fake_upstream(busy, busy, Answer(body=chat_stream("Hi"))) as it:
        assert (await asked(it, Patience(2))).text == "Hi"
    assert len(it.asked) == 3


async def test_tries_are_counted() -> None:
    async with fake_upstream(error_answer(503, {"retry-after": "0"})) as it:
        with pytest.raises(Unavailable):
            await asked(it, Patience(2))
    assert len(it.asked) == 3


@pytest.mark.parametrize(
    "answer", [Answer(body=chat_stream("Hi")[:1], hangs=True), Answer(body=[b": nothing yet\n\n"], hangs=True)]
)
async def test_leaving_early_closes_the_connection_at_once(answer: Answer) -> None:
    async with fake_upstream(answer) as it:
        task = asyncio.create_task(asked(it))
        await it.hanging.wait()
        task.cancel()
        async with asyncio.timeout(60):
            await it.gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_short_question_gives_status_and_json() -> None:
    async with fake_upstream(Answer(200, [b'{"a": 1}']), Answer(404, [b"what?"])) as it:
        same = client(it)
        assert await same.ask("GET", "/a") == (200, {"a": 1})
        assert await same.ask("POST", "/b", b"[]") == (404, None)
        await same.close()
    assert [(a.method, a.path, a.body) for a in it.asked] == [("GET", "/a", None), ("POST", "/b", [])]


def test_fields_are_added_to_a_written_body() -> None:
    assert json.loads(with_fields(b'{"a":1}', {"b": [2], "c": None})) == {"a": 1, "b": [2], "c": None}
    assert with_fields(b'{"a":1}', {}) == b'{"a":1}'
