"""Bytes that never become a request: too many, too slow, or not HTTP at all."""

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

from modelyard.http.connection import BoundedHttp
from tests.serving import Served, demo, serving

POST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(demo() | {"http": {"max_header_bytes": 4096}}) as running:
        yield running


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def told(line: socket.socket) -> tuple[int, dict[str, str], Any]:
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
def test_headers_without_an_end_are_cut_off(served: Served, data: bytes) -> None:
    with connect(served) as line:
        line.sendall(data)
        status, headers, body = told(line)
    assert (status, headers["connection"], headers["content-type"]) == (431, "close", "application/json")
    assert "http.max_header_bytes" in body["error"]["message"]
    assert ("request_id" in body) == data.startswith(b"POST")
    assert is_alive(served)


def test_complete_headers_that_are_too_large_are_refused_in_the_protocols_shape(served: Served) -> None:
    for path, kind in (("/v1/messages", "request_too_large"), ("/v1/responses", "invalid_request_error")):
        reply = httpx.post(served.url + path, headers={"x-large": "a" * 5000}, json={})
        assert reply.status_code in (413, 431)
        assert reply.json()["error"]["type"] == kind
    assert httpx.get(served.url + "/" + "a" * 5000).status_code in (413, 431)
    assert is_alive(served)


def test_headers_below_the_limit_are_fine(served: Served) -> None:
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
def test_what_is_not_http_is_refused_in_json(served: Served, data: bytes) -> None:
    with connect(served) as line:
        line.sendall(data)
        status, headers, body = told(line)
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
def test_a_client_that_falls_silent_before_its_request_is_complete_is_let_go(
    served: Served, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(BoundedHttp, "patience_s", 0.05)
    with connect(served) as line:
        line.sendall(data)
        while line.recv(65536):
            pass  # a refusal may come first; what counts is that the connection ends


# --- patience, on a clock of our own ----------------------------------------------------------------------------------


class Clock:
    """As much of a loop as a connection needs, with time that passes when the test says so."""

    def __init__(self) -> None:
        self.now, self._timers = 0.0, list[tuple[float, Any, Any]]()

    def call_later(self, delay: float, deed: Any) -> Any:
        handle = SimpleNamespace(cancel=lambda: self._timers.remove(timer) if timer in self._timers else None)
        timer = (self.now + delay, deed, handle)
        self._timers.append(timer)
        return handle

    def time(self) -> float:
        return self.now

    @property
    def is_still(self) -> bool:
        return not self._timers

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self._timers if timer[0] <= self.now]:
            self._timers.remove(timer)
            timer[1]()


class Line:
    """The transport's side of a connection."""

    def __init__(self) -> None:
        self.closed = False

    def get_extra_info(self, _: str) -> None: ...
    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Nobody:
    """Takes every request and never answers."""

    def join(self, steps: Any, *_: Any) -> None:
        steps.close()


@pytest.fixture
def made() -> tuple[BoundedHttp, Line, Clock]:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
    clock, line = Clock(), Line()
    connection = BoundedHttp.bounded(4096)(config, ServerState(), {}, _loop=clock)
    connection.parade = Nobody()  # type: ignore[assignment]
    connection.connection_made(line)  # type: ignore[arg-type]
    return connection, line, clock


Made = tuple[BoundedHttp, Line, Clock]


def test_headers_that_trickle_are_let_go_however_lively(made: Made) -> None:
    connection, line, clock = made
    connection.data_received(POST)
    for number in range(29):
        clock.pass_(1)
        connection.data_received(b"x: %d\r\n" % number)
    assert not line.closed
    clock.pass_(1)
    assert line.closed


def test_a_body_may_take_its_time_but_not_fall_silent(made: Made) -> None:
    connection, line, clock = made
    connection.data_received(POST + b"Content-Length: 100\r\n\r\n")
    for _ in range(50):
        clock.pass_(29)
        connection.data_received(b"a")
    assert not line.closed
    clock.pass_(30)
    assert line.closed


def test_a_silence_of_our_own_is_not_the_clients(made: Made) -> None:
    connection, line, clock = made
    connection.data_received(POST + b"Content-Length: 100\r\n\r\na")
    connection.flow.pause_reading()
    for _ in range(5):
        clock.pass_(30)
    assert not line.closed
    connection.flow.resume_reading()
    clock.pass_(30)
    assert line.closed


def test_patience_ends_with_the_request_and_not_with_the_answer(made: Made) -> None:
    connection, line, clock = made
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    clock.pass_(10_000)
    assert not line.closed


def test_a_request_that_is_begun_on_an_old_connection_must_be_ended_too(made: Made) -> None:
    connection, line, clock = made
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    clock.pass_(100)
    connection.data_received(b"GET /")
    clock.pass_(30)
    assert line.closed


def test_a_client_that_left_before_anybody_watched_is_not_forgotten(made: Made) -> None:
    connection, _, _ = made
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    scope: Any = connection.scope
    assert (scope["modelyard.farewells"], connection.cycle.disconnected) == (set(), False)
    connection.connection_lost(None)
    assert "modelyard.farewells" not in scope  # whoever watches now asks the connection, which says:
    assert connection.cycle.disconnected


def ask(connection: BoundedHttp) -> None:
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")


def answer(connection: BoundedHttp) -> None:
    connection.cycle.response_complete = True
    connection.on_response_complete()


def test_a_connection_that_nobody_uses_is_closed_after_its_time_and_not_before(made: Made) -> None:
    connection, line, clock = made
    idle = connection.timeout_keep_alive
    ask(connection)
    clock.pass_(10 * idle)
    answer(connection)
    clock.pass_(idle - 1)
    ask(connection)
    answer(connection)  # its time begins anew
    clock.pass_(idle - 1)
    assert not line.closed
    clock.pass_(1)
    assert line.closed


def test_a_connection_is_not_idle_while_its_client_waits(made: Made) -> None:
    connection, line, clock = made
    ask(connection)
    answer(connection)
    clock.pass_(1)
    ask(connection)
    clock.pass_(10 * connection.timeout_keep_alive)
    assert not line.closed
    answer(connection)
    clock.pass_(connection.timeout_keep_alive)
    assert line.closed


def test_a_connection_that_ends_leaves_no_timer_behind(made: Made) -> None:
    connection, _, clock = made
    ask(connection)
    answer(connection)
    connection.connection_lost(None)
    assert clock.is_still


@pytest.mark.parametrize(
    ("url", "path", "raw", "query"),
    [
        (b"/v1/models?a=1&b", "/v1/models", b"/v1/models", b"a=1&b"),
        (b"/models/a%2Fb%20c", "/models/a/b c", b"/models/a%2Fb%20c", b""),
        (b"/?", "/", b"/", b""),
    ],
)
def test_an_address_is_told_as_asgi_has_it(made: Made, url: bytes, path: str, raw: bytes, query: bytes) -> None:
    connection, _, _ = made
    connection.data_received(b"GET " + url + b" HTTP/1.0\r\nHost: x\r\n\r\n")
    scope: Any = connection.scope
    assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == ("GET", path, raw, query)
    assert (scope["http_version"], connection.cycle.keep_alive) == ("1.0", False)


def test_a_connection_that_never_asked_ends_quietly(made: Made) -> None:
    connection, line, _ = made
    connection.connection_lost(None)
    assert line.closed
