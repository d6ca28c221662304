"""Limits on what a client may send before it gets a reply: size, time, and valid HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from modelyard.http.connection import ClientConnection, LimitedConnection, cancel_on_disconnect
from tests.live_server import LiveServer, demo_config, live_server

POST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(demo_config() | {"http": {"max_header_bytes": 4096}}) as running:
        yield running


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_reply(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """The one reply on this connection, read until the server closes it."""
    got = b""
    while piece := connection.recv(65536):
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = dict(each.split(": ", 1) for each in rest)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, json.loads(body)


def is_alive(server: LiveServer) -> bool:
    return httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        POST + b"x: " + b"a" * 5000,
        POST + b"x: a\r\n" * 1000,
        b"GET /" + b"a" * 5000,
        b"POST /v1/messages" + b"a" * 5000,
    ],
)
def test_headers_that_exceed_the_limit_before_they_end_are_refused(server: LiveServer, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        status, headers, body = read_reply(connection)
    assert (status, headers["connection"], headers["content-type"]) == (431, "close", "application/json")
    assert "http.max_header_bytes" in body["error"]["message"]
    assert ("request_id" in body) == data.startswith(b"POST")
    assert is_alive(server)


def test_large_complete_headers_are_refused_in_the_shape_of_the_protocol(server: LiveServer) -> None:
    for path, kind in (("/v1/messages", "request_too_large"), ("/v1/responses", "invalid_request_error")):
        reply = httpx.post(server.url + path, headers={"x-large": "a" * 5000}, json={})
        assert reply.status_code in (413, 431)
        assert reply.json()["error"]["type"] == kind
    assert httpx.get(server.url + "/" + "a" * 5000).status_code in (413, 431)
    assert is_alive(server)


def test_a_body_that_is_refused_by_its_size_is_read_to_its_end_so_that_the_client_sees_why(server: LiveServer) -> None:
    body = b" " * (64 << 20)
    reply = httpx.post(server.url + "/v1/messages", content=body)
    assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert "http.max_body_bytes" in reply.json()["error"]["message"]
    with connect(server) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        connection.sendall(body)
        assert read_reply(connection)[0] == 413
        assert connection.recv(1) == b""
    assert is_alive(server)


def test_headers_below_the_limit_are_accepted(server: LiveServer) -> None:
    assert httpx.get(server.url + "/", headers={"x-large": "a" * 3000}).status_code == 200


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
def test_invalid_http_is_refused_in_json(server: LiveServer, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        status, headers, body = read_reply(connection)
    assert (status, headers["connection"]) == (400, "close")
    assert body["error"]["type"] == "invalid_request_error"
    assert is_alive(server)


HEALTH = b"GET /health/live HTTP/1.1\r\n"
CHUNKED = b"Host: localhost\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (HEALTH + b"\r\n", "Host"),
        (HEALTH + b"Host: localhost\r\nHost: localhost\r\n\r\n", "Host"),
        (HEALTH.replace(b"1.1", b"1.0") + b"Host: localhost\r\nhost: evil\r\n\r\n", "Host"),
        (HEALTH + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n", "Host"),
        (POST + CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n", "Transfer-Encoding"),
        (POST + CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "Invalid HTTP"),
        (POST + CHUNKED + b"TE: gzip, chunked\r\n\r\n0\r\n\r\n", "TE"),
    ],
)
def test_a_head_that_others_may_read_differently_is_refused(server: LiveServer, data: bytes, named: str) -> None:
    data = data.replace(POST, POST.partition(b"\r\n")[0] + b"\r\n")
    with connect(server) as connection:
        connection.sendall(data + HEALTH + b"Host: localhost\r\n\r\n")
        status, headers, body = read_reply(connection)
        assert connection.recv(1) == b"", "nothing behind it is answered"
    assert (status, headers["connection"]) == (400, "close")
    assert named in body["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        HEALTH.replace(b"1.1", b"1.0") + b"\r\n",
        HEALTH + b"Host: localhost\r\nConnection: close\r\nTE: trailers\r\n\r\n",
        HEALTH + b"Host: localhost\r\nConnection: close\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_a_head_with_one_reading_is_answered(server: LiveServer, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        assert read_reply(connection)[0] == 200


def test_one_connection_serves_many_requests(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.post("/tokenize", json={"content": "a" * 3000}, headers={"x": "a" * 3000}).status_code == 200


INCOMPLETE_REQUESTS = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nx: ",
    POST + b"Content-Length: 10\r\n\r\n",
    POST + b"Content-Length: 10\r\n\r\n{",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
]


@pytest.mark.parametrize("data", INCOMPLETE_REQUESTS)
def test_a_client_that_stops_before_its_request_is_complete_is_disconnected(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(LimitedConnection, "receive_timeout_s", 0.05)
    with connect(server) as connection:
        connection.sendall(data)
        while connection.recv(65536):
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

    def time(self) -> float:
        return self.now

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
        self.closed, self.reading, self.aborted, self.unsent = False, True, False, 0

    def get_extra_info(self, _: str) -> None: ...
    def write(self, data: bytes) -> None: ...
    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.closed = True


FakeConnection = tuple[LimitedConnection, Transport, Clock]


@pytest.fixture
def fake_connection() -> FakeConnection:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off")
    clock, transport = Clock(), Transport()
    connection = LimitedConnection.configured(4096, stall_s=120)(config, ServerState(), {}, _loop=clock)
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport, clock


def test_headers_that_trickle_in_have_a_total_time_limit(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST)
    for number in range(29):
        clock.advance(1)
        connection.data_received(b"x: %d\r\n" % number)
    assert not transport.closed
    clock.advance(1)
    assert transport.closed


def test_a_slow_body_is_accepted_but_a_silent_one_is_not(
    fake_connection: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.http.connection.MIN_BODY_BYTES", 100)  # nobody reads it here
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 10000\r\n\r\n")
    for _ in range(50):
        clock.advance(29)
        connection.data_received(b"a" * 100)
    assert not transport.closed
    clock.advance(30)
    assert transport.closed


@pytest.mark.parametrize("head", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_body_that_trickles_in_ends_like_headers_that_do(fake_connection: FakeConnection, head: bytes) -> None:
    connection, transport, clock = fake_connection
    piece = b"1\r\na\r\n" if b"chunked" in head else b"a"
    connection.data_received(POST + head + piece)
    for _ in range(29):
        clock.advance(1)
        connection.data_received(piece)
    assert not transport.closed
    clock.advance(1)
    assert transport.closed


def test_time_in_which_the_server_does_not_read_does_not_count(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 100\r\n\r\na")
    transport.pause_reading()
    for _ in range(5):
        clock.advance(30)
    assert not transport.closed
    transport.resume_reading()
    clock.advance(30)
    assert transport.closed


def test_a_complete_request_has_no_time_limit_for_its_reply(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    clock.advance(10_000)
    assert not transport.closed


def test_a_second_request_on_a_connection_has_the_same_time_limit(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    clock.advance(100)
    connection.data_received(b"GET /")
    clock.advance(30)
    assert transport.closed


def test_a_client_that_disconnects_before_its_handler_runs_is_noticed(fake_connection: FakeConnection) -> None:
    connection, _, _ = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    client = ClientConnection.of(cast(Any, connection.scope))
    assert client is not None
    assert not client.is_lost
    connection.connection_lost(None)
    assert client.is_lost  # so that the handler waits for http.disconnect


def test_a_client_that_disconnects_before_the_handler_of_an_earlier_request_runs_is_noticed(
    fake_connection: FakeConnection,
) -> None:
    connection, _, _ = fake_connection
    connection.data_received((POST + b"Content-Length: 2\r\n\r\n{}") * 2)
    clients = [ClientConnection.of(cast(Any, cycle.scope)) for cycle in (*connection._earlier, connection.cycle)]
    assert [client and client.is_lost for client in clients] == [False, False]
    connection.connection_lost(None)
    assert [client and client.is_lost for client in clients] == [True, True]


def test_a_client_that_reads_nothing_is_disconnected(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    transport.unsent = 100_000
    connection.pause_writing()
    for _ in range(3):
        clock.advance(30)
    assert not transport.aborted
    clock.advance(30)
    assert transport.aborted


def test_a_client_that_reads_slowly_stays_connected(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    transport.unsent = 100_000
    connection.pause_writing()
    for _ in range(20):
        clock.advance(90)
        transport.unsent -= 1000
        clock.advance(30)
    assert not transport.aborted
    connection.resume_writing()
    assert not clock.has_timers


def test_a_closed_connection_waits_only_so_long_for_its_client_to_read(fake_connection: FakeConnection) -> None:
    connection, transport, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    transport.unsent = 10
    connection.transport.close()
    assert transport.closed
    connection.resume_writing()  # below the low-water mark, but not sent
    for _ in range(4):
        clock.advance(30)
    assert transport.aborted


@pytest.mark.parametrize("reason", [None, ConnectionResetError()], ids=["closed", "reset"])
def test_a_lost_connection_leaves_no_timer(fake_connection: FakeConnection, reason: Exception | None) -> None:
    connection, _, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 10\r\n\r\n{")
    assert clock.has_timers
    connection.connection_lost(reason)
    assert not clock.has_timers


def test_a_connection_that_is_reset_after_its_reply_leaves_no_timer(fake_connection: FakeConnection) -> None:
    connection, _, clock = fake_connection
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    connection.on_response_complete()
    assert clock.has_timers, "it would be closed after some time without a request"
    connection.connection_lost(ConnectionResetError())
    assert not clock.has_timers


def test_a_connection_without_a_request_closes_quietly(fake_connection: FakeConnection) -> None:
    connection, transport, _ = fake_connection
    connection.connection_lost(None)
    assert transport.closed


# Writes are coalesced, and HTTP connections behave as clients expect.

ORIGIN = "https://chat.example"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()


@pytest.fixture(scope="module")
def coalescing_server() -> Iterator[LiveServer]:
    with live_server(demo_config() | {"http": {"cors_enabled": True, "cors_origins": [ORIGIN]}}) as running:
        yield running


@pytest.fixture(scope="module")
def post_plain() -> Iterator[LiveServer]:
    with live_server(demo_config()) as running:
        yield running


def request(*headers: str, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(BODY)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + BODY


class RawConnection:
    """A connection that is read reply by reply."""

    def __init__(self, coalescing_server: LiveServer) -> None:
        host, port = coalescing_server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._got = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self) -> tuple[str, dict[str, str], Any]:
        while b"\r\n\r\n" not in self._got:
            self._more()
        head, _, self._got = self._got.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        if first.startswith("HTTP/1.1 100"):
            return self.reply()
        headers = dict(connection.split(": ", 1) for connection in rest)
        size = int(headers["content-length"])
        while len(self._got) < size:
            self._more()
        body, self._got = self._got[:size], self._got[size:]
        return first, headers, json.loads(body)

    def _more(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the server closed the connection in the middle of a reply"
        self._got += data

    @property
    def is_over(self) -> bool:
        return not self._got and not self._socket.recv(65536)


def test_a_connection_is_kept_alive_after_a_reply(post_plain: LiveServer) -> None:
    with RawConnection(post_plain) as connection:
        for _ in range(3):
            connection.send(request())
            first, headers, body = connection.reply()
            assert first == "HTTP/1.1 200 OK"
            assert headers["x-request-id"] == headers["request-id"] == f"req_{body['id'].removeprefix('chatcmpl-')}"
            assert headers["content-type"] == "application/json"
            assert body["choices"][0]["message"]["content"] == "Hello there."


def test_pipelined_requests_are_answered_in_order(post_plain: LiveServer) -> None:
    with RawConnection(post_plain) as connection:
        connection.send(request(path="/apply-template") + request() + request(path="/apply-template"))
        kinds = [connection.reply()[2].get("object", "prompt") for _ in range(3)]
    assert kinds == ["prompt", "chat.completion", "prompt"]


@pytest.mark.parametrize("raw_request", [request("Connection: close"), request(version="1.0")])
def test_a_client_that_asks_to_close_sees_the_end(post_plain: LiveServer, raw_request: bytes) -> None:
    with RawConnection(post_plain) as connection:
        connection.send(raw_request)
        first, headers, body = connection.reply()
        assert (first, headers["connection"]) == ("HTTP/1.1 200 OK", "close")
        assert body["choices"][0]["finish_reason"] == "stop"
        assert connection.is_over


def test_expect_100_continue_is_answered(post_plain: LiveServer) -> None:
    with RawConnection(post_plain) as connection:
        connection.send(request("Expect: 100-continue") + request())
        assert [connection.reply()[0] for _ in range(2)] == ["HTTP/1.1 200 OK"] * 2


def test_a_middleware_in_between_adds_its_headers(coalescing_server: LiveServer) -> None:
    reply = httpx.post(f"{coalescing_server.url}/v1/chat/completions", content=BODY, headers={"origin": ORIGIN})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert reply.json()["choices"][0]["message"]["content"] == "Hello there."


# A client disconnect cancels its work, under our server and under any other.


class FakeWork:
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_lost_connection_cancels_the_work_that_is_still_watched():
    client = ClientConnection()
    scope = {"extensions": client.extensions}
    here, gone = FakeWork(), FakeWork()
    cancel_on_disconnect(scope, never, here.cancel)
    cancel_on_disconnect(scope, never, gone.cancel)()
    client.lose()
    assert here.cancelled.is_set()
    assert not gone.cancelled.is_set()


async def test_work_that_starts_after_the_disconnect_is_cancelled() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    client = ClientConnection()
    client.lose()
    work = FakeWork()
    cancel_on_disconnect({"extensions": client.extensions}, receive, work.cancel)
    await asyncio.wait_for(work.cancelled.wait(), 60)


async def test_under_another_server_the_disconnect_message_cancels_the_work():
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    work = FakeWork()
    cancel_on_disconnect({}, receive, work.cancel)
    await asyncio.wait_for(work.cancelled.wait(), 60)


async def test_work_that_is_no_longer_watched_is_not_cancelled():
    raw_request = asyncio.Event()

    async def receive() -> Any:
        raw_request.set()
        await never()

    work = FakeWork()
    stop_watching = cancel_on_disconnect({}, receive, work.cancel)
    await asyncio.wait_for(raw_request.wait(), 60)
    stop_watching()
    await asyncio.sleep(0)
    assert not work.cancelled.is_set()
