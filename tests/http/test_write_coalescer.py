"""Writes are coalesced, and HTTP connections behave as clients expect."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from modelyard.http.write_coalescer import CoalescingTransport, WriteCoalescer
from tests.serving import Served, demo, serving

ORIGIN = "https://chat.example"
ASKED = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(demo() | {"http": {"cors_enabled": True, "cors_origins": [ORIGIN]}}) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serving(demo()) as running:
        yield running


def request(*headers: str, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(ASKED)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + ASKED


class Line:
    """A connection that is read reply by reply."""

    def __init__(self, served: Served) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._got = b""

    def __enter__(self) -> Line:
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
        headers = dict(line.split(": ", 1) for line in rest)
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


def test_a_connection_is_kept_alive_after_a_reply(plain: Served) -> None:
    with Line(plain) as line:
        for _ in range(3):
            line.send(request())
            first, headers, body = line.reply()
            assert first == "HTTP/1.1 200 OK"
            assert headers["x-request-id"] == headers["request-id"] == f"req_{body['id'].removeprefix('chatcmpl-')}"
            assert headers["content-type"] == "application/json"
            assert body["choices"][0]["message"]["content"] == "Hello there."


def test_pipelined_requests_are_answered_in_order(plain: Served) -> None:
    with Line(plain) as line:
        line.send(request(path="/apply-template") + request() + request(path="/apply-template"))
        kinds = [line.reply()[2].get("object", "prompt") for _ in range(3)]
    assert kinds == ["prompt", "chat.completion", "prompt"]


@pytest.mark.parametrize("asked", [request("Connection: close"), request(version="1.0")])
def test_a_client_that_asks_to_close_sees_the_end(plain: Served, asked: bytes) -> None:
    with Line(plain) as line:
        line.send(asked)
        first, headers, body = line.reply()
        assert (first, headers["connection"]) == ("HTTP/1.1 200 OK", "close")
        assert body["choices"][0]["finish_reason"] == "stop"
        assert line.is_over


def test_expect_100_continue_is_answered(plain: Served) -> None:
    with Line(plain) as line:
        line.send(request("Expect: 100-continue") + request())
        assert [line.reply()[0] for _ in range(2)] == ["HTTP/1.1 200 OK"] * 2


def test_a_middleware_in_between_adds_its_headers(served: Served) -> None:
    told = httpx.post(f"{served.url}/v1/chat/completions", content=ASKED, headers={"origin": ORIGIN})
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == ORIGIN
    assert told.json()["choices"][0]["message"]["content"] == "Hello there."


class Transport:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def coalescing(coalescer: WriteCoalescer | None = None) -> tuple[Transport, CoalescingTransport]:
    wire = Transport()
    return wire, CoalescingTransport(
        cast(asyncio.Transport, wire), asyncio.get_running_loop(), coalescer or WriteCoalescer()
    )


async def test_writes_of_one_loop_iteration_are_sent_as_one() -> None:
    wire, line = coalescing()
    line.write(b"a")
    line.write(b"b")
    assert wire.sent == []
    await asyncio.sleep(0)
    line.write(b"c")
    assert wire.sent == [b"ab"]
    line.close()
    assert (wire.sent, wire.closed) == ([b"ab", b"c"], True)


async def test_nothing_is_written_to_a_connection_that_closes() -> None:
    wire, line = coalescing()
    line.close()
    line.write(b"late")
    await asyncio.sleep(0)
    assert (wire.sent, wire.closed) == ([], True)


async def test_a_broken_connection_does_not_block_the_others() -> None:
    coalescer, told = WriteCoalescer(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    (first, one), (broken, two), (last, three) = (coalescing(coalescer) for _ in range(3))
    broken.write = _break  # type: ignore[method-assign]
    for line in (one, two, three):
        line.write(b"a")
    await asyncio.sleep(0)
    assert (first.sent, last.sent, told) == ([b"a"], [b"a"], ["no line"])


def _break(data: bytes) -> None:
    raise OSError("no line")
