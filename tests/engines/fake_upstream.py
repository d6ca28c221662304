"""A small HTTP server with scripted answers. It records requests and notices clients that leave early."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec import Struct, field


class Answer(Struct):
    """Each item of `body` is one chunk. `hangs`: sends nothing more and keeps the connection. `breaks`: closes it."""

    status: int = 200
    body: list[bytes] = []
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    hangs: bool = False
    breaks: bool = False


def error_answer(status: int, headers: Mapping[str, str] | None = None, **error: Any) -> Answer:
    body = json.dumps({"error": {"message": "no", **error}}).encode()
    return Answer(status, [body], {"content-type": "application/json", **(headers or {})})


def json_answer(body: str) -> Answer:
    return Answer(200, [body.encode()], {"content-type": "application/json"})


def chat_stream(*texts: str) -> list[bytes]:
    """An OpenAI Chat stream with these deltas."""
    chunks: list[Any] = [{"id": "1", "choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    chunks += [{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}}]
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]


class ReceivedRequest(Struct):
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class FakeUpstream:
    """Gives the answers in order, then the last one again and again."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers, self.requests = answers, list[ReceivedRequest]()
        self.url = ""
        self.connections = 0
        self.client_left = asyncio.Event()  # before the end of its answer
        self.hanging = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._tasks.add(task := asyncio.create_task(self._serve(reader, writer)))
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._serve_request(reader, writer):
                    pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        self.requests.append(ReceivedRequest(method, path, headers, json.loads(body) if body else None))
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        return await self._send(answer, reader, writer)

    async def _send(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        writer.write(f"HTTP/1.1 {answer.status} X\r\n{headers}transfer-encoding: chunked\r\n\r\n".encode())
        for chunk in answer.body:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
        if answer.breaks:
            return False
        if answer.hangs:
            self.hanging.set()
            await reader.read(1)
            self.client_left.set()
            return False
        writer.write(b"0\r\n\r\n")
        return True


@asynccontextmanager
async def fake_upstream(*answers: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeUpstream]:
    upstream = FakeUpstream(list(answers))
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, ssl=tls)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        await upstream.close()
        await server.wait_closed()
