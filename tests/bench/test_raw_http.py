"""The client on raw sockets: keep-alive, bodies of every framing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from bench.raw_http import HttpClient
from tests.bench_command.raw_server import responding

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"content-length: 5\r\n\r\nhello",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        OK + b"connection: close\r\n\r\nhello",
    ],
    ids=["content-length", "chunked", "until the connection ends"],
)
async def test_a_body_is_read_whatever_its_framing(reply: bytes) -> None:
    async with responding(reply) as url:
        client = HttpClient(url)
        response = await client.send(client.request("POST", "/", b"{}"), 10.0)
    assert (response.status, response.body, response.error) == (200, b"hello", None)
    assert response.sent <= response.parts[0][0] <= response.ended


@pytest.mark.parametrize("reply", [OK + b"content-length: 5\r\n\r\nhe", OK, b"nonsense\r\n\r\n"])
async def test_an_incomplete_response_has_an_error(reply: bytes) -> None:
    async with responding(reply) as url:
        client = HttpClient(url)
        response = await client.send(client.request("GET", "/"), 10.0)
    assert (response.error or "").startswith("the connection broke: ")


@asynccontextmanager
async def counting_server() -> AsyncIterator[tuple[str, list[int]]]:
    """A keep-alive server; the number of requests on each connection."""
    counts: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(counts)
        counts.append(0)
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                counts[place] += 1
                writer.write(OK + b"content-length: 2\r\n\r\nok")

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", counts
        for writer in writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize(("keep_alive", "expected"), [(True, [3]), (False, [1, 1, 1])])
async def test_plain_connections_are_reused_only_on_request(keep_alive: bool, expected: list[int]) -> None:
    async with counting_server() as (url, counts):
        client = HttpClient(url, keep_alive=keep_alive)
        for _ in range(3):
            assert (await client.send(client.request("GET", "/"), 10.0)).body == b"ok"
        await client.aclose()
        assert counts == expected


async def test_a_request_over_the_time_limit_is_not_followed_by_another_on_its_connection() -> None:
    async with responding(b"") as url:
        client = HttpClient(url, keep_alive=True)
        response = await client.send(client.request("GET", "/"), 0.05)
        assert response.error == "not finished within 0.05 s"
        assert not client._idle
        assert not client.connections
