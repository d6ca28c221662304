"""Streams that wait, stall or fail; handlers that run in a task; a log record for every request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from modelyard.core.errors import Internal
from modelyard.core.events import Event, Failed
from modelyard.core.request import Message, Request, Text
from modelyard.http import inference
from modelyard.http.inference import PROGRESS_HEADER, EventStream, Exchange, PingTimer
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.request_context import RequestContext
from modelyard.protocols import openai_chat
from tests.e2e.helpers import wait_for_running
from tests.http.app_client import app_client
from tests.live_server import demo_config, live_server

REQUEST = Request(model="m", messages=(Message("user", (Text("hi"),)),), stream=True)
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Source:
    """A stream of events without a gateway; `hook` runs before each batch."""

    reuse = None
    ignored: tuple[str, ...] = ()
    prepared = SimpleNamespace(skipped=(), target=None, not_enforced=(), ignored=(), compacted="")

    def __init__(self, *batches: list[Event], hook: Any = None) -> None:
        self._batches, self._hook = list(batches), hook
        self.cancelled = self.closed = False

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> tuple[int, list[Event]]:
        if not self._batches:
            raise StopAsyncIteration
        if self._hook is not None:
            self._hook()
        return 0, self._batches.pop(0)

    def cancel(self, reason: Any = None) -> None:
        self.cancelled = True

    def close(self) -> None:
        self.closed = True


def stream_of(source: Source, send: Any, **settings: Any) -> EventStream:
    return EventStream(
        cast(Any, source),
        openai_chat.writer(REQUEST, "t"),
        lambda error: openai_chat.write_error(error, trace="t"),
        Exchange({}, never, send, RequestContext("t", "/v1/chat/completions", {}), None, None),
        PingTimer(**settings),
    )


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_ping_that_is_due_is_sent_before_the_failure_and_nothing_after_it() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    def make_ping_due() -> None:
        stream.last_sent = 0.0
        stream._pings._tick()

    source = Source([Failed(Internal("out of memory", id="x"))], hook=make_ping_due)
    stream = stream_of(source, send, keepalive_s=10)
    await stream.run()

    start, ping, failure, end = sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert ping["body"] == b": keep-alive\n\n"
    assert b"out of memory" in failure["body"]
    assert (end["body"], end["more_body"]) == (b"", False)


async def test_silent_streams_ping_within_the_interval_and_others_do_not() -> None:
    pings, released = PingTimer(0.2), asyncio.Event()

    class Waiting(Source):
        async def __anext__(self) -> tuple[int, list[Event]]:
            await released.wait()
            return await super().__anext__()

    def stream(sent: list[float]) -> EventStream:
        async def send(message: Any) -> None:
            sent.append(loop.time())

        silent = stream_of(Waiting([Failed(Internal("over", id="x"))]), send, keepalive_s=0.2)
        silent._pings = pings
        return silent

    loop = asyncio.get_running_loop()
    began, sent, busy_sent = loop.time(), list[float](), list[float]()
    silent, busy = stream(sent), stream(busy_sent)
    running = [asyncio.ensure_future(one.run()) for one in (silent, busy)]
    while not sent:
        busy.last_sent = time.monotonic()
        await asyncio.sleep(0.01)
    assert sent[0] - began >= 0.1
    assert not busy_sent
    released.set()
    await asyncio.gather(*running)
    assert not pings._streams


@pytest.mark.parametrize("since", [0.0, 0.1, 2.4, 2.6, 4.9, 7.4])
async def test_a_stream_is_never_silent_for_longer_than_the_keepalive_time(
    monkeypatch: pytest.MonkeyPatch, since: float
) -> None:
    """Whenever it was added while the timer of all streams runs; with a clock of the test's own."""
    now, timers = 1000.0, list[tuple[float, Any]]()
    loop = SimpleNamespace(call_later=lambda delay, call: timers.append((now + delay, call)))
    monkeypatch.setattr(inference, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    monkeypatch.setattr(inference, "time", SimpleNamespace(monotonic=lambda: now))
    silences: list[float] = []

    class Silent:
        def __init__(self, at: float) -> None:
            self.last_sent = at

        def ping(self) -> None:
            silences.append(now - self.last_sent)
            self.last_sent = now

    pings = PingTimer(10.0)
    pings.add(cast(Any, Silent(now + 1e9)))  # it sends all the time, and keeps the timer running
    pings.add(cast(Any, Silent(now + since)))
    while len(silences) < 5:
        now, call = timers.pop(0)
        call()
    assert max(silences) <= 10.0
    assert min(silences) > 7.0, "no more often than needed"


def test_a_stalled_client_on_a_socket_frees_its_slot() -> None:
    """http.stall_s, end to end: the client sends a request for an endless stream and never reads."""
    endless = [{"steps": [{"repeat": 100_000, "steps": [{"text": "word " * 200}]}]}]
    config = demo_config(endless) | {"http": {"stall_s": 0.2, "keepalive_s": 0.05}}
    config["caches"] = {"main": {"model": "demo", "n_ctx": 100_000_000, "parallel": 1}}
    config["routes"] = [{"match": "*", "cache": "main"}]
    body = httpx.Request("POST", "http://x", json=BODY | {"stream": True}).read()
    with live_server(config) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited: the buffers fill up quickly
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            wait_for_running(server, 1)
            wait_for_running(server, 0)


async def test_a_handler_runs_in_a_task_so_that_asyncio_timeout_works() -> None:
    """Also for inference endpoints, on a real connection."""
    tasks: list[Any] = []
    original = RequestMiddleware.__call__

    async def with_timeout(self: Any, scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.timeout(60):
            tasks.append(asyncio.current_task())
            await original(self, scope, receive, send)

    with pytest.MonkeyPatch.context() as patch, live_server(demo_config()) as server:
        patch.setattr(RequestMiddleware, "__call__", with_timeout)
        reply = await asyncio.to_thread(httpx.post, f"{server.url}/v1/chat/completions", json=BODY)
    assert reply.status_code == 200
    assert tasks
    assert None not in tasks


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    handler, logger = Records(), logging.getLogger("modelyard.http")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_standard_logging_handler_receives_every_request(records: list[logging.LogRecord]) -> None:
    async with app_client(loaded=True) as client:
        for path, body in (("/v1/chat/completions", BODY), ("/v1/messages", {}), ("/nowhere", {})):
            await client.post(path, json=body)
        await client.get("/health")
    fields: list[Any] = [vars(r)["fields"] for r in records if r.getMessage() == "request"]
    assert [(f["path"], f["status"]) for f in fields] == [
        ("/v1/chat/completions", 200),
        ("/v1/messages", 400),
        ("/nowhere", 404),
        ("/health", 200),
    ]
    assert all(record.name == "modelyard.http" for record in records)


async def test_parameters_that_the_engine_ignores_are_reported_in_a_header_and_a_metric() -> None:
    async with app_client(loaded=True) as client:
        plain = await client.post("/v1/chat/completions", json=BODY)
        whole = await client.post("/v1/chat/completions", json=BODY | {"top_p": 0.5, "temperature": 1})
        streamed = await client.post("/v1/chat/completions", json=BODY | {"top_p": 0.5, "stream": True})
        metrics = (await client.get("/metrics")).text
    assert "x-modelyard-ignored" not in plain.headers
    assert whole.headers["x-modelyard-ignored"] == "temperature, top_p"
    assert streamed.headers["x-modelyard-ignored"] == "top_p"
    assert 'request_warnings_total{kind="parameter_ignored"} 2.0' in metrics


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_tells_of_queue_and_prompt_in_comments_if_it_is_asked(path: str) -> None:
    """Whatever the protocol: a client of any of them skips comments."""
    script = [
        {"when": "first", "steps": [{"delay": 0.8}]},
        {"steps": [{"prefill": 0.8, "progress": 8}, {"text": "ok"}]},
    ]
    config = demo_config(script, parallel=1)
    del config["caches"], config["routes"]
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"input": "Hi"} if path == "/v1/responses" else {"max_tokens": 9, "messages": messages}
    body = {"model": "demo", "stream": True, **asked}
    with live_server(config) as running, httpx.Client(base_url=running.url) as client:
        first = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "first"}]}
        with client.stream("POST", "/v1/chat/completions", json=first):
            wait_for_running(running, 1)
            with client.stream("POST", path, json=body, headers={PROGRESS_HEADER: "true"}) as reply:
                text = "".join(reply.iter_text())
        told = re.findall(rf"^: {PROGRESS_HEADER}: (.+)$", text, re.MULTILINE)
        states = [json.loads(one) for one in told]
        assert states[0] == {"state": "queued", "waiting": 1}
        assert states[-1]["state"] == "reading"
        assert 0 < states[-1]["done"] <= states[-1]["total"]
        assert text.rindex(PROGRESS_HEADER) < text.index('"ok"')
        plain = client.post(path, json=body).text
    assert PROGRESS_HEADER not in plain
