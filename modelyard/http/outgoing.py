"""What goes out on a connection: all writes of one turn of the loop as one, and a whole reply past ASGI's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class Gathering:
    """A transport that sends once a turn of the loop what was written in it: headers and body are one system call.

    Whole replies wait for the end of the turn, too: a client that gets its answer at once asks at once, and the loop,
    which would have read all clients' next requests in one go, turns for each of them. That costs a fifth of all.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self.is_closing = transport.is_closing  # asked at every reply: `__getattr__` would cost more than the answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self._flush()
        self._transport.close()


def reply(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
    """Answers in one write. `headers` are our own words, `content-length` among them.

    False, with nothing done: somebody stands between us and the connection and has to see the messages (`send` is not
    the connection's own then), or it is not the plain case of a client that is there, reads, and stays.
    """
    cycle = getattr(send, "__self__", None)
    if type(cycle) is not RequestResponseCycle:
        return False
    is_plain = cycle.keep_alive and not (cycle.response_started or cycle.disconnected or cycle.default_headers)
    if not is_plain or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
        return False
    head = b"\r\n".join([b": ".join(header) for header in headers])
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n\r\n", body)))
    cycle.message_event.set()  # whoever waits for a disconnect hears of the end, as in uvicorn's own way
    cycle.on_response()
    return True
