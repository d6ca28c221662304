"""Unusual clients on raw sockets: upgrades, pipelining, a closed side, HTTP/1.0, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.helpers import wait_for_running, wait_until
from tests.live_server import LiveServer, live_server

SCRIPT: list[dict[str, Any]] = [
    {"when": "^slow", "steps": [{"text": "Hello"}, {"delay": 0.2}, {"text": " there."}]},
    {"when": "^prefill", "steps": [{"prefill": 0.1}, {"text": "Hello there."}]},
    {"when": "^hang", "steps": [{"text": "Hello"}, {"hang": True}]},
    {"when": "^endless prefill", "steps": [{"prefill": 600}, {"text": "never"}]},
    {"when": "^endless", "steps": [{"repeat": 100_000, "steps": [{"text": "word " * 200}]}]},
    {"when": "^large", "steps": [{"repeat": 2000, "steps": [{"text": "word " * 400}]}]},
    {"steps": [{"text": "Hello there."}]},
]
CONFIG: dict[str, Any] = {
    "models": {"demo": {"backend": "fake", "token_delay": 0, "script": SCRIPT}},
    "caches": {"main": {"model": "demo", "n_ctx": 100_000_000, "parallel": 4}},
    "routes": [{"match": "*", "cache": "main"}],
    "http": {"max_header_bytes": 4096, "stall_s": 0.4, "keepalive_s": 0.5},
}
PATH = "/v1/chat/completions"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(CONFIG) as running:
        yield running


def body(text: str, *, stream: bool = False, pad: int = 0) -> bytes:
    request = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}
    return json.dumps(request).encode() + b" " * pad


def post(content: bytes, *headers: str, version: str = "1.1", path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


class Client:
    def __init__(self, server: LiveServer, receive_buffer: int = 0) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect((host, int(port)))
        self.got = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_until(self, pattern: bytes) -> bytes:
        while not (found := re.search(pattern, self.got, re.DOTALL)):
            data = self.socket.recv(65536)
            assert data, f"the server closed the connection after {self.got!r}"
            self.got += data
        read, self.got = self.got[: found.end()], self.got[found.end() :]
        return read

    def reply(self) -> tuple[int, Any]:
        head = self.read_until(rb"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        content = self.read_until(rb".{%d}" % size if size else rb"")
        return int(head.split()[1]), json.loads(content)

    def read_to_end(self) -> bytes:
        while data := self.socket.recv(1 << 20):
            self.got += data
        return self.got


def text_of(reply: Any) -> Any:
    return reply["choices"][0]["message"]["content"]


# --- upgrades ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "upgrade",
    [
        H2C,
        ("Connection: upgrade", "Upgrade: h2c"),
        ("Connection: keep-alive, Upgrade", "Upgrade: websocket"),
        ("Connection: Upgrade", "Connection: keep-alive", "Upgrade: websocket"),
        ("Upgrade: TLS/1.0", "Connection: Upgrade"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_read(
    server: LiveServer, upgrade: tuple[str, ...], chunks: int
) -> None:
    data = post(body("Hi"), *upgrade)
    with Client(server) as client:
        for _ in range(2):  # the connection stays usable
            if chunks == 1:
                client.send(data)
            else:
                head, _, rest = data.partition(b"\r\n\r\n")
                client.send(head + b"\r\n\r\n")
                client.send(rest)
            status, reply = client.reply()
            assert (status, text_of(reply)) == (200, "Hello there.")


def test_a_body_after_an_upgrade_is_never_a_request(server: LiveServer) -> None:
    """Request smuggling: a proxy that forwards Upgrade sees one request here."""
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Client(server) as client:
        client.send(post(smuggled, *H2C).removesuffix(smuggled))
        client.send(smuggled)
        status, reply = client.reply()
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        client.send(post(body("Hi"), "Connection: close"))
        assert client.reply()[0] == 200
        assert client.read_to_end() == b""


def test_a_chunked_body_after_an_upgrade_is_read(server: LiveServer) -> None:
    content = body("Hi")
    with Client(server) as client:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        client.send(head.encode() + "\r\n".join(H2C).encode() + b"\r\n\r\n")
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))
        assert text_of(client.reply()[1]) == "Hello there."


@pytest.mark.parametrize("offer", [H2C, ("Connection: Upgrade", "Upgrade: websocket")])
def test_an_offer_of_another_protocol_by_a_client_that_asks_to_close_is_answered(
    server: LiveServer, offer: tuple[str, ...]
) -> None:
    with Client(server) as client:
        client.send(post(body("Hi"), *offer, "Connection: close"))
        assert text_of(client.reply()[1]) == "Hello there."
        assert client.read_to_end() == b""


def test_a_websocket_without_a_key_is_a_plain_request(server: LiveServer) -> None:
    with Client(server) as client:
        client.send(
            b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        status, reply = client.reply()
        assert (status, reply["error"]["code"]) == (405, "method_not_allowed")


def test_an_upgrade_after_a_running_request_waits_for_its_turn(server: LiveServer) -> None:
    websocket = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with Client(server) as client:
        client.send(post(body("slow")) + websocket + post(body("Hi"), *H2C))
        assert text_of(client.reply()[1]) == "Hello there."
        assert client.reply()[1]["status"] == "healthy"
        assert text_of(client.reply()[1]) == "Hello there."


def test_connect_is_refused(server: LiveServer) -> None:
    with Client(server) as client:
        client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert client.reply()[0] == 400
        assert client.read_to_end() == b""


# --- pipelining -------------------------------------------------------------------------------------------------------


def test_headers_that_follow_a_large_body_are_counted_alone(server: LiveServer) -> None:
    second = post(body("Hi"))
    with Client(server) as client:
        for cut in (1, 20, len(second) - 40):
            client.send(post(body("Hi", pad=60_000)) + second[:cut])
            assert client.reply()[0] == 200
            client.send(second[cut:])
            assert client.reply()[0] == 200


def test_headers_behind_a_request_are_limited_too(server: LiveServer) -> None:
    with Client(server) as client:
        client.send(post(body("Hi")) + b"GET / HTTP/1.1\r\nx: ")
        assert client.reply()[0] == 200
        client.send(b"a" * 5000)
        assert client.reply()[0] == 431
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    "garbage", [b"@@@ nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"GET /" + b"a" * 9000]
)
def test_what_follows_a_request_is_refused_after_its_stream(server: LiveServer, garbage: bytes) -> None:
    with Client(server) as client:
        client.send(post(body("slow", stream=True)))
        client.read_until(rb"Hello")
        client.send(garbage)
        client.send(b"more of it" * 1000)
        rest = client.read_until(rb"0\r\n\r\n")
        assert b"HTTP/1.1" not in rest
        assert b" there." in rest
        assert b"[DONE]" in rest
        assert client.reply()[0] in (400, 431)
        assert client.read_to_end() == b""


def test_a_broken_body_behind_a_running_request_is_refused_after_it(server: LiveServer) -> None:
    with Client(server) as client:
        broken = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        client.send(post(body("slow")) + broken.encode())
        assert text_of(client.reply()[1]) == "Hello there."
        assert client.reply()[0] == 400
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    "first", [b"GET /v1/admin/events HTTP/1.1\r\nHost: localhost\r\n\r\n", post(body("endless prefill"))]
)
def test_a_disconnect_ends_every_pipelined_request(server: LiveServer, first: bytes) -> None:
    """Also one that is not the last, and whose reply is not written just now."""
    with Client(server) as client:
        client.send(first + post(body("Hi")) * 5)
        wait_until(lambda: tasks(server, "run_asgi") == 1, "the first request runs")
    wait_until(lambda: tasks(server, "run_asgi") == 0, "no request is left")


def tasks(server: LiveServer, coroutine: str) -> int:
    return sum(coroutine in str(task.get_coro()) for task in asyncio.all_tasks(server.loop))


# --- trailers ---------------------------------------------------------------------------------------------------------


def chunked(content: bytes, trailers: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"%x\r\n%b\r\n0\r\n%b" % (len(content), content, trailers)


def test_a_trailer_is_no_header(server: LiveServer) -> None:
    with Client(server) as client:
        client.send(chunked(body("Hi"), b"X-Modelyard-Timeout: never\r\n\r\n"))
        assert text_of(client.reply()[1]) == "Hello there."


@pytest.mark.parametrize("trailer", [b"x: " + b"a" * 2000, b"x: a\r\n" * 300])
def test_trailers_are_limited_as_headers_are(server: LiveServer, trailer: bytes) -> None:
    with Client(server) as client:
        client.send(chunked(body("Hi"), b""))
        for _ in range(3):
            time.sleep(0.05)
            client.send(trailer)
        assert client.reply()[1]["error"]["code"] == "headers_too_large"


# --- a client that closes its side ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Hi", "slow", "prefill"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_survives_the_closed_side_of_its_client(server: LiveServer, text: str, version: str) -> None:
    with Client(server) as client:
        client.send(post(body(text, stream=True), version=version))
        if text == "slow" or version == "1.0":  # before the first byte nothing can be sent to HTTP/1.0
            client.read_until(rb"Hello")
        client.socket.shutdown(socket.SHUT_WR)
        assert b"data: [DONE]" in client.read_to_end()


def test_a_whole_reply_survives_the_closed_side_of_its_client(server: LiveServer) -> None:
    with Client(server) as client:
        client.send(post(body("prefill")))
        client.socket.shutdown(socket.SHUT_WR)
        got = client.read_to_end()
    *interim, head, reply = got.split(b"\r\n\r\n")
    assert set(interim) <= {b"HTTP/1.1 100 Continue"}
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in head
    assert text_of(json.loads(reply)) == "Hello there."


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("text", ["hang", "endless prefill"])
def test_a_client_that_is_gone_is_noticed_at_once(server: LiveServer, stream: bool, version: str, text: str) -> None:
    with Client(server) as client:
        client.send(post(body(text, stream=stream), version=version))
        if stream and text == "hang":
            client.read_until(rb"Hello[^\n]*\n\n(\r\n)?")
        wait_for_running(server, 1)
    wait_for_running(server, 0)


def test_a_request_that_is_cut_off_is_not_answered(server: LiveServer) -> None:
    for data in (b"", b"GET / HT", post(body("Hi"))[:-1]):
        with Client(server) as client:
            client.send(data)
            client.socket.shutdown(socket.SHUT_WR)
            assert client.read_to_end() == b""


# --- HTTP/1.0 ---------------------------------------------------------------------------------------------------------


def test_http_1_0_gets_no_chunks(server: LiveServer) -> None:
    with Client(server) as client:
        client.send(post(body("slow", stream=True), "Expect: 100-continue", version="1.0"))
        head, _, content = client.read_to_end().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert all(event.startswith((b"data: ", b": ")) for event in content.split(b"\n\n")[:-1])
    assert content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics", "/nowhere"])
def test_http_1_0_gets_whole_replies(server: LiveServer, path: str) -> None:
    with Client(server) as client:
        client.send(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        head, _, content = client.read_to_end().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(content) > 0  # type: ignore[index]


# --- a client that does not read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(post(body("endless", stream=True)), id="stream"),
        pytest.param(post(body("large")), id="whole reply"),
        pytest.param(post(body("large"), "Connection: close"), id="whole reply, then close"),
        pytest.param(post(body("large"), version="1.0"), id="HTTP/1.0"),
    ],
)
def test_a_client_that_reads_nothing_is_disconnected(server: LiveServer, data: bytes) -> None:
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited: the buffers fill up quickly
    with Client(server, receive_buffer=4096) as client:
        client.send(data)
        client.socket.recv(1, socket.MSG_PEEK)
        wait_until(lambda: _is_reset(client.socket), "the connection is reset")
    wait_for_running(server, 0)


def _is_reset(connection: socket.socket) -> bool:
    """Without reading: the error that the system has noted."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
