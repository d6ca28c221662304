"""Limits on what a client may send before it gets a reply: size, time, and valid HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from modelyard.http.connection import LimitedConnection
from tests.serving import Served, demo, serving

POST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(demo() | {"http": {"max_header_bytes": 4096}}) as running:
        yield running


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_reply(line: socket.socket) -> tuple[int, dict[str, str], Any]:
    """The one reply on this connection, read until the server closes it."""
    got = b""
    while piece := line.recv(65536):
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = dict(each.split(": ", 1) for each in rest)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, json.loads(body)


def is_alive(served: Served) -> bool:
    return httpx.get(served.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        POST + b"x: " + b"a" * 5000,
        POST + b"x: a\r\n" * 1000,
        b"GET /" + b"a" * 5000,
        b"POST /v1/messages" + b"a" * 5000,
    ],
)
def test_headers_that_exceed_the_limit_before_they_end_are_refused(served: Served, data: bytes) -> None:
    with connect(served) as line:
        line.sendall(data)
        status, headers, body = read_reply(line)
    assert (status, headers["connection"], headers["content-type"]) == (431, "close", "application/json")
    assert "http.max_header_bytes" in body["error"]["message"]
    assert ("request_id" in body) == data.startswith(b"POST")
    assert is_alive(served)


def test_large_complete_headers_are_refused_in_the_shape_of_the_protocol(served: Served) -> None:
    for path, kind in (("/v1/messages", "request_too_large"), ("/v1/responses", "invalid_request_error")):
        reply = httpx.post(served.url + path, headers={"x-large": "a" * 5000}, json={})
        assert reply.status_code in (413, 431)
        assert reply.json()["error"]["type"] == kind
    assert httpx.get(served.url + "/" + "a" * 5000).status_code in (413, 431)
    assert is_alive(served)


def test_headers_below_the_limit_are_accepted(served: Served) -> None:
    assert httpx.get(served.url + "/", headers={"x-large": "a" * 3000}).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: \xb2\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"bad header\r\n\r\n",
        POST + b"x: a\x00b\r\n\r\n",
    ],
)
def test_invalid_http_is_refused_in_json(served: Served, data: bytes) -> None:
    with connect(served) as line:
        line.sendall(data)
        status, headers, body = read_reply(line)
    assert (status, headers["connection"]) == (400, "close")
    assert body["error"]["type"] == "invalid_request_error"
    assert is_alive(served)


def test_one_connection_serves_many_requests(served: Served) -> None:
    with httpx.Client(base_url=served.url) as client:
        for _ in range(3):
            assert client.post("/tokenize", json={"content": "a" * 3000}, headers={"x": "a" * 3000}).status_code == 200


SILENCES = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nx: ",
    POST + b"Content-Length: 10\r\n\r\n",
    POST + b"Content-Length: 10\r\n\r\n{",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
]


@pytest.mark.parametrize("data", SILENCES)
def test_a_client_that_stops_before_its_request_is_complete_is_disconnected(
    served: Served, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(LimitedConnection, "receive_timeout_s", 0.05)
    with connect(served) as line:
        line.sendall(data)
        while line.recv(65536):
            pass  # an error may come first; the connection must end


# --- timeouts, with a simulated clock ---------------------------------------------------------------------------------


class Task:
    def add_done_callback(self, _: Any) -> None: ...


class Clock:
    """The part of an event loop that a connection uses, with simulated time."""

    def __init__(self) -> None:
        self.now, self._timers = 0.0, list[tuple[float, Any, Any]]()

    def call_later(self, delay: float, callback: Any, *_: Any) -> Any:
        handle = SimpleNamespace(cancel=lambda: self._timers.remove(timer) if timer in self._timers else None)
        timer = (self.now + delay, callback, handle)
        self._timers.append(timer)
        return handle

    def create_task(self, coroutine: Any, **_: Any) -> Any:
        """Requests are accepted and never answered."""
        coroutine.close()
        return Task()

    def call_soon(self, callback: Any, *_: Any) -> None: ...

    @property
    def has_timers(self) -> bool:
        return bool(self._timers)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self._timers if timer[0] <= self.now]:
            self._timers.remove(timer)
            timer[1]()


class Transport:
    def __init__(self) -> None:
        self.closed, self.reading = False, True

    def get_extra_info(self, _: str) -> None: ...
    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


Made = tuple[LimitedConnection, Transport, Clock]


@pytest.fixture
def made() -> Made:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
    clock, transport = Clock(), Transport()
    connection = LimitedConnection.configured(4096)(config, ServerState(), {}, _loop=clock)
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport, clock


def test_headers_that_trickle_in_have_a_total_time_limit(made: Made) -> None:
    connection, transport, clock = made
    connection.data_received(POST)
    for number in range(29):
        clock.advance(1)
        connection.data_received(b"x: %d\r\n" % number)
    assert not transport.closed
    clock.advance(1)
    assert transport.closed


def test_a_slow_body_is_accepted_but_a_silent_one_is_not(made: Made) -> None:
    connection, transport, clock = made
    connection.data_received(POST + b"Content-Length: 100\r\n\r\n")
    for _ in range(50):
        clock.advance(29)
        connection.data_received(b"a")
    assert not transport.closed
    clock.advance(30)
    assert transport.closed


def test_time_in_which_the_server_does_not_read_does_not_count(made: Made) -> None:
    connection, transport, clock = made
    connection.data_received(POST + b"Content-Length: 100\r\n\r\na")
    transport.pause_reading()
    for _ in range(5):
        clock.advance(30)
    assert not transport.closed
    transport.resume_reading()
    clock.advance(30)
    assert transport.closed


def test_a_complete_request_has_no_time_limit_for_its_reply(made: Made) -> None:
    connection, transport, clock = made
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    clock.advance(10_000)
    assert not transport.closed


def test_a_second_request_on_a_connection_has_the_same_time_limit(made: Made) -> None:
    connection, transport, clock = made
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    clock.advance(100)
    connection.data_received(b"GET /")
    clock.advance(30)
    assert transport.closed


def test_a_client_that_disconnects_before_its_handler_runs_is_noticed(made: Made) -> None:
    connection, _, _ = made
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    scope: Any = connection.scope
    assert scope["modelyard.on_disconnect"] == set()
    connection.connection_lost(None)
    assert "modelyard.on_disconnect" not in scope  # so that the handler waits for http.disconnect


def test_a_lost_connection_leaves_no_timer(made: Made) -> None:
    connection, _, clock = made
    connection.data_received(POST + b"Content-Length: 10\r\n\r\n{")
    assert clock.has_timers
    connection.connection_lost(None)
    assert not clock.has_timers


def test_a_connection_without_a_request_closes_quietly(made: Made) -> None:
    connection, transport, _ = made
    connection.connection_lost(None)
    assert transport.closed
