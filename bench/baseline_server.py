"""The smallest server: raw sockets and a prepared stream. The baseline of latencies, and an upstream for proxies.

`python -m bench.baseline_server PORT [DELAY]`: every request gets the same 16 tokens as server-sent events, in one
write or with DELAY seconds before each event, and every GET a list of one model, `bench`. Nothing of a request is
parsed but its end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import cast

import uvloop

WORDS = [f" word{n:02}" for n in range(16)]


def _event(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": "bench", "object": "chat.completion.chunk"}
    return _chunk(f"data: {json.dumps({**head, 'choices': [choice]}, separators=(',', ':'))}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = [_event({"role": "assistant", "content": ""}), *(_event({"content": word}) for word in WORDS)]
EVENTS += [_event({}, "stop"), _chunk(b"data: [DONE]\n\n")]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"
STREAM = _HEAD + b"".join(EVENTS) + _END
_LIST = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"bench"}]}'
MODELS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_LIST), _LIST)


class BaselineProtocol(asyncio.Protocol):
    def __init__(self, delay: float = 0.0) -> None:
        self._received, self._delay = b"", delay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if request_length(self._received) == len(self._received):
            is_get, self._received = self._received.startswith(b"GET"), b""
            if is_get:
                self.transport.write(MODELS)
            elif self._delay:
                self._write_next(iter([_HEAD, *EVENTS, _END]))
            else:
                self.transport.write(STREAM)

    def _write_next(self, parts: Iterator[bytes]) -> None:
        if (part := next(parts, None)) is not None and not self.transport.is_closing():
            self.transport.write(part)
            asyncio.get_running_loop().call_later(self._delay, self._write_next, parts)


def request_length(received: bytes) -> int | None:
    """The length of a whole request with a Content-Length; None while its head is incomplete."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = received[:end].lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
    return end + 4 + int(length or 0)


async def serve(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(BaselineProtocol, delay), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
