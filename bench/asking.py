"""Asks a server for streamed chat answers, several at once: when tokens came, and what the server counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import uvloop
from msgspec import Struct

from bench.load import Connection
from bench.stats import Stream

_LIMIT_S = 900.0
# SmolLM2's ends of text and of turn, made so unlikely that every answer has the length it was asked for.
_NEVER = {"0": -100, "2": -100}


class Answer(Struct, frozen=True):
    """Times in seconds on one clock. `evaluated` are the prompt's tokens that came from no cache."""

    sent: float
    first: float
    last: float
    tokens: int
    prompt: int
    evaluated: int
    text: str
    times: tuple[float, ...] = ()  # of each event that brought tokens

    def between(self, begin: float, end: float) -> float:
        """Tokens that came after `begin` and up to `end`; events bring about the same number each."""
        return self.tokens * sum(begin < at <= end for at in self.times) / len(self.times)

    @property
    def ttft(self) -> float:
        return self.first - self.sent


def body(model: str, messages: Sequence[dict[str, str]], tokens: int) -> bytes:
    asked: dict[str, Any] = {"model": model, "messages": list(messages), "max_tokens": tokens, "temperature": 0}
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": _NEVER}
    return json.dumps(asked).encode()


def ask(port: int, *bodies: bytes) -> list[Answer]:
    """All of them at once, each on a connection of its own."""
    return uvloop.run(_ask(port, bodies))


async def _ask(port: int, bodies: Sequence[bytes]) -> list[Answer]:
    asked = [await _Question.opened(port, body) for body in bodies]
    for one in asked:
        one.connection.send()
    return list(await asyncio.wait_for(asyncio.gather(*(one.answer() for one in asked)), _LIMIT_S))


class _Question:
    """One connection with one request on it."""

    connection: Connection

    def __init__(self) -> None:
        self._over: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    @classmethod
    async def opened(cls, port: int, body: bytes) -> _Question:
        self, loop = cls(), asyncio.get_running_loop()
        make = lambda: Connection(repeat(request(port, body)), True, self._done)  # noqa: E731
        self.connection = (await loop.create_connection(make, "127.0.0.1", port))[1]
        return self

    def _done(self, connection: Connection) -> None:
        if not self._over.done():
            self._over.set_result(connection)

    async def answer(self) -> Answer:
        done = await self._over
        done.transport.abort()
        stream = Stream(done.sent, tuple(done.parts))
        if done.broken or not stream.is_whole:
            raise RuntimeError(f"the answer is not a whole stream: {done.said}")
        return read(stream)


def request(port: int, body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read(stream: Stream) -> Answer:
    """Ours says how many tokens came from a cache, llama-server how many it evaluated."""
    events = list(_events(dechunked(b"".join(data for _, data in stream.parts))))
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    timings = next((event["timings"] for event in reversed(events) if event.get("timings")), {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))
    times = stream.token_times()
    return Answer(
        sent=stream.sent,
        first=times[0],
        last=times[-1],
        tokens=usage["completion_tokens"],
        prompt=usage["prompt_tokens"],
        evaluated=timings.get("prompt_n", usage["prompt_tokens"] - cached),
        text=text,
        times=tuple(times),
    )


def dechunked(raw: bytes) -> bytes:
    """The body of an answer in chunked encoding."""
    out, rest = [], raw.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        out.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(out)


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = (line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:"))
    return [json.loads(line) for line in lines if line != b"[DONE]"]
