"""A small upstream that answers as it is told, writes down what it was asked, and notices who leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec import Struct, field


class Answer(Struct):
    """`body` goes out piece by piece; `hangs`: nothing more comes, and the connection stays open."""

    status: int = 200
    body: list[bytes] = []
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    hangs: bool = False
    breaks: bool = False


def error_answer(status: int, headers: Mapping[str, str] | None = None, **error: Any) -> Answer:
    body = json.dumps({"error": {"message": "no", **error}}).encode()
    return Answer(status, [body], {"content-type": "application/json", **(headers or {})})


def chat_stream(*texts: str) -> list[bytes]:
    """An OpenAI stream that says these."""
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
    """Answers in the order given; the last one again and again."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers, self.asked = answers, list[ReceivedRequest]()
        self.url = ""
        self.connections = 0
        self.gone = asyncio.Event()  # a client left before its answer was over
        self.hanging = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(task := asyncio.create_task(self._talk(reader, writer)))
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        self.asked.append(ReceivedRequest(method, path, headers, json.loads(body) if body else None))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        return await self._answer(answer, reader, writer)

    async def _answer(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        writer.write(f"HTTP/1.1 {answer.status} X\r\n{headers}transfer-encoding: chunked\r\n\r\n".encode())
        for piece in answer.body:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if answer.breaks:
            return False
        if answer.hangs:
            self.hanging.set()
            await reader.read(1)
            self.gone.set()
            return False
        writer.write(b"0\r\n\r\n")
        return True


@asynccontextmanager
async def fake_upstream(*answers: Answer) -> AsyncIterator[FakeUpstream]:
    it = FakeUpstream(list(answers))
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield it
    finally:
        server.close()
        await it.close()
        await server.wait_closed()
