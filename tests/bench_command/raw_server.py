"""A server for tests that reads one request and responds with given bytes, whatever the request is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def responding(reply: bytes, requests: list[bytes] | None = None) -> AsyncIterator[str]:
    """Its URL. An empty reply is none at all; `requests` collects the heads of the requests."""
    hold = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                if requests is not None:
                    requests.append(head)
                # Read all of it: closing earlier would reset the connection, and the reply would be lost.
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0))
                writer.write(reply)
                await writer.drain()
                if not reply:
                    await hold.wait()
        finally:
            writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        hold.set()
        server.close()
        await server.wait_closed()


def sse(*data: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + b"".join(f"data: {line}\n\n".encode() for line in data)


def chunk(text: str, finish: str = "null") -> str:
    return f'{{"id":"1","choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{finish}}}]}}'
