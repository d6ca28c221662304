"""A streamed reply in the one moment that a socket cannot arrange: a ping that is due as the answer fails."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from modelyard.core.errors import Internal
from modelyard.core.events import Event, Failed
from modelyard.core.request import Message, Request, Text
from modelyard.http.request_context import RequestContext
from modelyard.http.settings import HttpSettings
from modelyard.http.sse import EventStream
from modelyard.protocols import openai_chat

REQUEST = Request(model="m", messages=(Message("user", (Text("hi"),)),), stream=True)


class FailsAsItIsPinged:
    """An answer whose failure comes in the same turn of the loop as the timer that sends a ping."""

    stream: Any
    reuse = None

    def __init__(self) -> None:
        self._over = False

    def __aiter__(self) -> FailsAsItIsPinged:
        return self

    async def __anext__(self) -> tuple[int, list[Event]]:
        if self._over:
            raise StopAsyncIteration
        self._over = True
        self.stream._last = 0.0  # as if nothing had been sent for ages
        self.stream._tick()
        return 0, [Failed(Internal("out of memory", id="x"))]

    def cancel(self) -> None: ...
    def close(self) -> None: ...


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_ping_that_is_due_goes_out_before_the_failure_and_nothing_after_it() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer, visit = FailsAsItIsPinged(), RequestContext("t", "/v1/chat/completions", {})
    refusal = lambda error: openai_chat.write_error(error, trace="t")  # noqa: E731
    settings = HttpSettings(keepalive_s=10)
    writer = openai_chat.writer(REQUEST, "t")
    answer.stream = EventStream(cast(Any, answer), writer, refusal, visit, settings, None)
    await answer.stream.run({}, never, send)

    start, ping, failure, end = sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert ping["body"] == b": keep-alive\n\n"
    assert b"out of memory" in failure["body"]
    assert (end["body"], end["more_body"]) == (b"", False)
