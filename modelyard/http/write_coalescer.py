"""What goes out on connections: all writes of one turn of the loop as one, for all of them at its end."""

from __future__ import annotations

import asyncio
from typing import Any


class WriteCoalescer:
    """The lines of one server that have something to send at the end of this turn of the loop."""

    def __init__(self) -> None:
        self._lines: list[CoalescingTransport] = []

    def expect(self, line: CoalescingTransport, loop: asyncio.AbstractEventLoop) -> None:
        if not self._lines:
            loop.call_soon(self._send, loop)
        self._lines.append(line)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            try:
                line.flush()
            except Exception as error:  # one broken line must not silence the others
                loop.call_exception_handler({"message": "a reply could not be sent", "exception": error})


class CoalescingTransport:
    """A transport that sends once a turn of the loop what was written in it: headers and body are one system call.

    Whole replies wait for the end of the turn, too: a client that gets its answer at once asks at once, and the loop,
    which would have read all clients' next requests in one go, turns for each of them. That costs a fifth of all.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, post: WriteCoalescer) -> None:
        self._transport, self._loop, self._post = transport, loop, post
        self._held: list[bytes] = []
        self.is_closing = transport.is_closing  # asked at every reply: `__getattr__` would cost more than the answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._post.expect(self, self._loop)
        self._held.append(data)

    def flush(self) -> None:
        held, self._held = self._held, []
        if held and not self.is_closing():
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self.flush()
        self._transport.close()
