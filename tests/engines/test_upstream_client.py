"""The HTTP client for upstreams: what a server may send, in any pieces, and what it must not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from modelyard.core.errors import InvalidRequest
from modelyard.engines.upstream_client import (
    ClientResponse,
    IncompleteResponse,
    InvalidResponse,
    ReadTimeout,
    UpstreamClient,
)
from modelyard.engines.upstream_connection import (
    ClientError,
    Connection,
    ConnectionLost,
    ConnectionPool,
    environment_proxy,
)

Serve = Callable[["Peer"], Awaitable[None]]

# The server runs on uvloop where it is installed, whose transports differ in details.
EVENT_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"


class Peer:
    """The server's side of a connection."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number, self.reader, self.writer = number, reader, writer

    async def request(self) -> tuple[str, bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def send(self, *pieces: bytes) -> None:
        """Each piece alone: the client's loop runs between them."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def left(self) -> None:
        async with asyncio.timeout(30):
            while await self.reader.read(1 << 16):
                pass


class Server:
    def __init__(self, serve: Serve) -> None:
        self.url, self.connections, self._serve = "", 0, serve
        self._tasks: list[asyncio.Task[None]] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(self.connections, reader, writer)
        self.connections += 1
        try:
            await self._serve(peer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()


@asynccontextmanager
async def served(serve: Serve, **options: object) -> AsyncIterator[tuple[UpstreamClient, Server]]:
    server = Server(serve)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = UpstreamClient(server.url, **({"headers": {}} | options))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            yield client, server
    finally:
        await client.close()
        listening.close()


async def read_all(response: ClientResponse) -> bytes:
    body = b""
    while data := await response.read():
        body += data
    return body


def answering(*pieces: bytes) -> Serve:
    async def serve(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*pieces)

    return serve


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


# --- responses --------------------------------------------------------------------------------------------------------


async def test_a_response_is_the_same_however_it_is_cut() -> None:
    whole = CHUNKED + chunked(b"one", b" two " * 9, b"three")
    for size in (1, 2, 3, 7, 50, len(whole)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        async with served(answering(*pieces)) as (client, server):
            for _ in range(2):
                response = await client.send("POST", "/x", b"{}")
                assert (response.status, response.headers["content-type"]) == (200, "text/plain")
                assert await read_all(response) == b"one" + b" two " * 9 + b"three"
                assert response.is_read
            assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc", id="length"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"", id="no body"),
        pytest.param(b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc", b"abc", id="lines that end with LF"),
        pytest.param(CHUNKED + b"3  \r\nabc\r\n0\r\n\r\n", b"abc", id="spaces after the size"),
        pytest.param(CHUNKED + b"3;x=y\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n", b"abc", id="extension and trailer"),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
            b"abc",
            id="interim responses",
        ),
    ],
)
async def test_every_way_to_write_a_response_is_read_and_keeps_the_connection(answer: bytes, body: bytes) -> None:
    async with served(answering(answer)) as (client, server):
        for _ in range(2):
            response = await client.send("POST", "/x", b"{}")
            assert await read_all(response) == body
            assert "link" not in response.headers
        assert server.connections == 1


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
async def test_a_body_without_a_length_ends_with_the_connection(head: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(head, b"abc", b"def")

    async with served(serve) as (client, server):
        for _ in range(2):
            assert await read_all(await client.send("POST", "/x", b"{}")) == b"abcdef"
        assert server.connections == 2


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_compressed_body_is_read_although_none_was_asked_for(
    name: str, compress: Callable[[bytes], bytes]
) -> None:
    data = compress(b"abc" * 1000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (name.encode(), len(data))
    async with served(answering(head, *[data[at : at + 1] for at in range(len(data))])) as (client, _):
        assert await read_all(await client.send("POST", "/x", b"{}")) == b"abc" * 1000


async def test_a_compressed_body_is_unpacked_a_piece_at_a_time() -> None:
    data = gzip.compress(bytes(20 << 20))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data)
    async with served(answering(head + data)) as (client, _):
        response, pieces = await client.send("POST", "/x", b"{}"), list[int]()
        while piece := await response.read():
            assert not response.is_read or sum(pieces) + len(piece) == 20 << 20
            pieces.append(len(piece))
    assert sum(pieces) == 20 << 20
    assert max(pieces) <= 1 << 20


@pytest.mark.parametrize("trailer", [b"x-%d: y\r\n", b"%d" + b"y" * 4096, b"3;x=%d\r\nabc\r\n"])
async def test_what_follows_a_body_is_bounded_but_not_a_body_in_small_chunks(trailer: bytes) -> None:
    is_body = trailer.startswith(b"3")
    count = 20_000

    async def serve(peer: Peer) -> None:
        await peer.request()
        with contextlib.suppress(ConnectionError):
            await peer.send(CHUNKED + b"3\r\nabc\r\n" + (b"" if is_body else b"0\r\nfirst: "))
            for n in range(count):
                await peer.send(trailer % n)
            await peer.send(b"0\r\n\r\n" if is_body else b"\r\n\r\n")

    async with served(serve) as (client, _):
        response = await client.send("POST", "/x", b"{}")
        if is_body:
            assert await read_all(response) == b"abc" * (count + 1)
        else:
            with pytest.raises(InvalidResponse, match="bytes of headers"):
                await read_all(response)


async def test_a_reader_that_is_late_pauses_the_connection_and_is_no_timeout() -> None:
    blocks = [bytes([n % 256]) * 10_000 for n in range(800)]
    sent = 0

    async def serve(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        peer.writer.write(CHUNKED)
        for block in blocks:
            peer.writer.write(b"%x\r\n%b\r\n" % (len(block), block))
            await peer.writer.drain()
            sent += 1
        await peer.send(b"0\r\n\r\n")
        await peer.left()

    async with served(serve, timeout=0.2) as (client, _):
        response = await client.send("POST", "/x", b"{}")
        before = -1
        while before != sent:  # until nothing more is taken, for longer than the timeout
            before = sent
            await asyncio.sleep(0.3)
        assert sent < len(blocks)
        assert await read_all(response) == b"".join(blocks)


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_request_has_its_headers_and_credentials_once() -> None:
    heads: list[str] = []

    async def serve(peer: Peer) -> None:
        while True:
            head, body = await peer.request()
            heads.append(head)
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with served(serve) as (_, server):
        url = server.url.replace("http://", "http://user:pass@")
        client = UpstreamClient(url, headers={"X-Mine": "1", "content-type": "application/json"})
        for body in (b"{}", b"", b"x" * 100_000):
            assert await read_all(await client.send("POST", "/a?b=c", body)) == body
        await client.close()
    for head in heads:
        lines = head.strip().split("\r\n")
        names = [line.partition(":")[0].lower() for line in lines[1:]]
        assert lines[0] == "POST /a?b=c HTTP/1.1"
        assert len(set(names)) == len(names)
        assert {"X-Mine: 1", "Authorization: Basic dXNlcjpwYXNz"} < set(lines)


async def test_a_header_cannot_add_a_line() -> None:
    async with served(answering(CHUNKED + chunked()), headers={"x": "1\r\nInjected: 2"}) as (client, server):
        with pytest.raises(ValueError, match="line break"):
            await client.send("POST", "/x", b"{}")
        assert server.connections <= 1


async def test_the_credentials_of_a_proxy_are_sent_to_it() -> None:
    heads: list[str] = []

    async def serve(peer: Peer) -> None:
        while True:
            heads.append((await peer.request())[0])
            await peer.send(CHUNKED + chunked(b"Hi"))

    async with served(serve) as (_, server):
        proxy = server.url.replace("http://", "http://user:pass@")
        client = UpstreamClient("http://api.invalid", headers={}, proxy=proxy)
        for _ in range(2):
            assert await read_all(await client.send("POST", "/x", b"{}")) == b"Hi"
        await client.close()
    for head in heads:
        assert head.startswith("POST http://api.invalid/x HTTP/1.1\r\n")
        assert head.count("Proxy-Authorization: Basic dXNlcjpwYXNz\r\n") == 1
        assert "Host: api.invalid\r\n" in head


async def test_without_keep_alive_every_request_has_its_connection() -> None:
    async with served(answering(CHUNKED + chunked(b"Hi")), keep_alive=False) as (client, server):
        for _ in range(2):
            assert await read_all(await client.send("POST", "/x", b"{}")) == b"Hi"
        assert server.connections == 2


async def test_requests_at_the_same_time_get_their_own_responses() -> None:
    async def serve(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await peer.send(CHUNKED, b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n")

    async with served(serve) as (client, server):

        async def one(n: int) -> bool:
            body = f"request {n}".encode()
            return await read_all(await client.send("POST", "/x", body)) == body

        for _ in range(5):
            assert all(await asyncio.gather(*(one(n) for n in range(50))))
        assert server.connections <= 50


# --- connections that must not be used again --------------------------------------------------------------------------


async def test_data_that_nobody_requested_is_never_the_next_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same packet as the end of a response, and later. No connection is closed here because it was idle."""
    monkeypatch.setattr("modelyard.engines.upstream_connection._KEEPALIVE_S", 1000.0)
    surplus = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"

    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + chunked(b"right") + (surplus if peer.number == 0 else b""))
        if peer.number == 1:
            await peer.send(surplus)
        await peer.left()
        left[peer.number].set()

    left = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    async with served(serve) as (client, server):
        for n in range(3):
            assert await read_all(await client.send("POST", "/x", b"{}")) == b"right"
            if n < 2:
                await left[n].wait()
        assert server.connections == 3


async def test_an_idle_connection_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + chunked(b"Hi"))
        await peer.left()
        left.set()

    left = asyncio.Event()
    monkeypatch.setattr("modelyard.engines.upstream_connection._KEEPALIVE_S", 0.05)
    async with served(serve) as (client, server):
        await read_all(await client.send("POST", "/x", b"{}"))
        await left.wait()
        await read_all(await client.send("POST", "/x", b"{}"))
        assert server.connections == 2


async def test_a_name_is_reached_at_the_next_address_if_the_first_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    async with served(answering(CHUNKED + chunked(b"Hi"))) as (_, server):
        client = UpstreamClient(server.url.replace("127.0.0.1", "two.invalid"), headers={})
        monkeypatch.setattr(client._pool, "loop", loop := Loop(asyncio.get_running_loop()))
        loop.getaddrinfo = both
        assert await read_all(await client.send("POST", "/x", b"{}")) == b"Hi"
        await client.close()


class Loop:
    """The running event loop; what is set here takes precedence."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def test_a_request_on_a_connection_that_the_server_has_just_closed_is_sent_again() -> None:
    async def serve(peer: Peer) -> None:
        requests.append(await peer.request())
        await peer.send(CHUNKED + chunked(b"Hi"))
        if peer.number == 0:
            requests.append(await peer.request())  # it was on its way when this end closed

    requests: list[tuple[str, bytes]] = []
    async with served(serve) as (client, server):
        for body in (b"1", b"2"):
            assert await read_all(await client.send("POST", "/x", body)) == b"Hi"
        assert server.connections == 2
    assert [body for _, body in requests] == [b"1", b"2", b"2"]


async def test_a_request_that_ends_every_connection_is_sent_again_once() -> None:
    async def serve(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            if body == b"bad":
                sent.append(peer.number)
                return
            await together.wait()
            await peer.send(CHUNKED + chunked(b"Hi"))

    sent: list[int] = []
    together = asyncio.Barrier(4)
    async with served(serve) as (client, server):
        await asyncio.gather(*(client.send("POST", "/x", b"good") for _ in range(4)))
        with pytest.raises(ConnectionLost):
            await client.send("POST", "/x", b"bad")
        assert (len(sent), server.connections) == (2, 4)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_that_may_have_ended_the_server_is_not_sent_again(begun: bool) -> None:
    """On a new connection, and on a used one after the first byte of a response."""

    async def serve(peer: Peer) -> None:
        if begun:
            await peer.request()
            await peer.send(CHUNKED + chunked(b"Hi"))
        requests.append(await peer.request())
        await peer.send(b"HTTP/1.1" if begun else b"")

    requests: list[tuple[str, bytes]] = []
    async with served(serve) as (client, server):
        if begun:
            await read_all(await client.send("POST", "/x", b"1"))
        with pytest.raises(ConnectionLost):
            await client.send("POST", "/x", b"2")
        assert (len(requests), server.connections) == (1, 1)


async def test_a_response_before_the_end_of_a_long_request_closes_the_connection() -> None:
    async def serve(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await left.wait()

    left = asyncio.Event()
    async with served(serve) as (client, server):
        for n in range(2):
            response = await client.send("POST", "/x", b" " * (32 << 20))
            assert (response.status, await read_all(response)) == (413, b"no")
            assert server.connections == n + 1
        left.set()


@pytest.mark.parametrize("sent", [b"", CHUNKED, CHUNKED + b"2\r\nHi\r\n"])
async def test_closing_a_response_early_closes_the_connection(sent: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        received.set()
        await peer.left()
        left.set()

    received, left = asyncio.Event(), asyncio.Event()
    async with served(serve) as (client, _):
        sending = asyncio.create_task(client.send("POST", "/x", b"{}"))
        await received.wait()
        if sent:
            (await sending).close()
        else:
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        await left.wait()


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(b"", ConnectionLost, id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-", ConnectionLost, id="half of the headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", IncompleteResponse, id="half a body"),
        pytest.param(CHUNKED + b"3\r\nabc\r\n", IncompleteResponse, id="no last chunk"),
        pytest.param(CHUNKED + b"zz\r\nabc\r\n", InvalidResponse, id="no size"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", InvalidResponse, id="another protocol"),
        pytest.param(
            b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", InvalidResponse, id="upgrade"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, InvalidResponse, id="endless headers"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", InvalidResponse, id="not gzip"
        ),
    ],
)
async def test_a_broken_response_is_an_error_and_the_next_one_is_not(answer: bytes, error: type[Exception]) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer if not sent else CHUNKED + chunked(b"Hi"))
        sent.append(peer.number)

    sent: list[int] = []
    async with served(serve, keep_alive=False) as (client, _):
        with pytest.raises(error):
            await read_all(await client.send("POST", "/x", b"{}"))
        assert await read_all(await client.send("POST", "/x", b"{}")) == b"Hi"


@pytest.mark.parametrize(
    ("greeting", "status"),
    [(b"SSH-2.0-OpenSSH_9.2\r\n", None), (b"HTTP/1.1 408 X\r\nContent-Length: 0\r\n\r\n", 408)],
)
async def test_what_a_server_says_before_it_is_asked_is_its_response(greeting: bytes, status: int | None) -> None:
    async def serve(peer: Peer) -> None:
        await peer.send(greeting)
        await peer.left()

    async with served(serve) as (client, _):
        if status is None:
            with pytest.raises(InvalidResponse):
                await client.send("POST", "/x", b"{}")
        else:
            response = await client.send("POST", "/x", b"{}")
            assert (response.status, await read_all(response)) == (status, b"")


async def test_a_connection_on_which_the_server_spoke_first_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its real response comes late: it, or the greeting, would be the response to somebody else's request."""

    async def acquire(pool: ConnectionPool) -> Connection:
        connection = await acquired(pool)
        if not greeted:  # what `data_received` keeps before a request
            greeted.append(connection)
            connection.early = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly"
        return connection

    async def serve(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await peer.send(CHUNKED + chunked(body))

    acquired, greeted = ConnectionPool.acquire, list[Connection]()
    monkeypatch.setattr(ConnectionPool, "acquire", acquire)
    async with served(serve) as (client, _):
        assert await read_all(await client.send("POST", "/x", b"first")) == b"early"
        assert await read_all(await client.send("POST", "/x", b"second")) == b"second"


async def test_what_arrived_before_the_fault_is_read_first() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"3\r\nabc\r\n")

    async with served(serve) as (client, _):
        response = await client.send("POST", "/x", b"{}")
        assert await response.read() == b"abc"
        with pytest.raises(IncompleteResponse):
            await response.read()


@pytest.mark.parametrize("sent", [b"", CHUNKED + b"3\r\nabc\r\n"])
async def test_silence_is_a_timeout_and_closes_the_connection(sent: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        await peer.left()
        left.set()

    left = asyncio.Event()
    async with served(serve, timeout=0.1) as (client, _):
        with pytest.raises(ReadTimeout):
            await read_all(await client.send("POST", "/x", b"{}"))
        await left.wait()


async def test_a_stream_may_take_longer_than_the_timeout_as_long_as_it_goes_on() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(12):
            await asyncio.sleep(0.05)
            await peer.send(b"1\r\nx\r\n")
        await peer.send(b"0\r\n\r\n")
        await peer.left()

    async with served(serve, timeout=0.4) as (client, _):
        assert await read_all(await client.send("POST", "/x", b"{}")) == b"x" * 12


async def test_closing_the_client_ends_a_response_that_is_read() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"3\r\nabc\r\n")
        await peer.left()

    async with served(serve) as (client, _):
        response = await client.send("POST", "/x", b"{}")
        assert await response.read() == b"abc"
        reading = asyncio.create_task(response.read())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ClientError):
            await reading


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "http://api.example.com/v1", None),
        ({"http_proxy": "http://proxy:3128"}, "http://api.example.com/v1", "http://proxy:3128"),
        ({"http_proxy": "http://proxy:3128"}, "https://api.example.com/v1", None),
        ({"https_proxy": "proxy:3128"}, "https://api.example.com/v1", "http://proxy:3128"),
        ({"all_proxy": "http://proxy:3128"}, "https://api.example.com/v1", "http://proxy:3128"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "example.com"}, "http://api.example.com/v1", None),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, "http://api.example.com/v1", None),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "api.lan"}, "http://me:secret@api.lan:8000/v1", None),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "api.lan:8000"}, "http://me:secret@api.lan:8000/v1", None),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "::1"}, "http://[::1]:8000/v1", None),
    ],
)
def test_the_environment_names_the_proxy(
    variables: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment_proxy(url) == proxy


def test_a_socks_proxy_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("all_proxy", "socks5://me:secret@proxy:1080")
    with pytest.raises(InvalidRequest, match=r"a socks5 proxy for api\.example\.com") as caught:
        environment_proxy("https://api.example.com/v1")
    assert "secret" not in caught.value.message
