"""The least that can answer: a raw socket server with canned answers, a latency's baseline and LiteLLM's upstream.

`python -m bench.bare PORT DELAY`: a body that asks for a stream gets 16 events, DELAY seconds apart (0: in one write),
any other body the whole answer. Nothing is parsed but the end of the request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

from bench.load import length_of

WORDS = [f" word{n:02}" for n in range(16)]
_IDENTITY = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": "bench"}
_USAGE = {"prompt_tokens": 100, "completion_tokens": 16, "total_tokens": 116}


def _event(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    data = json.dumps({**_IDENTITY, "object": "chat.completion.chunk", "choices": [choice]}, separators=(",", ":"))
    return _chunk(f"data: {data}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole() -> bytes:
    message = {"role": "assistant", "content": "".join(WORDS)}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    body = json.dumps({**_IDENTITY, "object": "chat.completion", "choices": choices, "usage": _USAGE}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


WHOLE = _whole()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [_event({"role": "assistant", "content": ""}), *(_event({"content": word}) for word in WORDS)]
LAST = _event({}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAM = HEAD + b"".join(EVENTS) + LAST


class Bare(asyncio.Protocol):
    def __init__(self, delay: float) -> None:
        self._delay, self._seen = delay, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        length = length_of(self._seen)
        if length is None or len(self._seen) < length:
            return
        streams = b'"stream":true' in self._seen or b'"stream": true' in self._seen
        self._seen = b""
        if not streams:
            self.transport.write(WHOLE)
        elif not self._delay:
            self.transport.write(STREAM)
        else:
            self.transport.write(HEAD + EVENTS[0])
            self._say(1)

    def _say(self, at: int) -> None:
        if self.transport.is_closing():
            return
        if at == len(EVENTS):
            self.transport.write(LAST)
            return
        self.transport.write(EVENTS[at])
        asyncio.get_running_loop().call_later(self._delay, self._say, at + 1)


async def serve(port: int, delay: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Bare(delay), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
