"""Coalesced writes: everything that is written to a connection in one iteration of the event loop is one system call,
and those of all connections follow each other.

So a peer with several connections is woken once for all of them: waking a process costs more than sending to it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

_NO_LINGER = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)  # on, for 0 seconds


class WriteCoalescer:
    """The connections that have data to send at the end of this iteration of the event loop."""

    def __init__(self) -> None:
        self._pending: list[CoalescingTransport] = []

    def schedule(self, transport: CoalescingTransport, loop: asyncio.AbstractEventLoop) -> None:
        if not self._pending:
            loop.call_soon(self._flush, loop)
        self._pending.append(transport)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        pending, self._pending = self._pending, []
        for transport in pending:
            try:
                transport.flush()
            except Exception as error:  # one broken connection must not block the others
                loop.call_exception_handler({"message": "data could not be sent", "exception": error})


class CoalescingTransport:
    """A transport that buffers writes until the end of the event loop's iteration.

    A server's whole replies wait too: a client that gets its reply earlier sends its next request earlier, and the
    loop then runs one iteration per client instead of one for all. That costs a fifth of the throughput.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        coalescer: WriteCoalescer,
        on_unsent: Callable[[], None] | None = None,
        keeps_reading: Callable[[], bool] | None = None,
    ) -> None:
        """`on_unsent` is called when the transport is closed before everything is sent. `keeps_reading` is asked
        before it is closed: True if that is done later."""
        self._transport, self._loop, self._coalescer, self.on_unsent = transport, loop, coalescer, on_unsent
        self._keeps_reading = keeps_reading
        self._buffer: list[bytes] = []
        self.is_closing = transport.is_closing  # called for every reply; `__getattr__` is slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._buffer:
            self._coalescer.schedule(self, self._loop)
        self._buffer.append(data)

    def writelines(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def flush(self) -> None:
        buffer, self._buffer = self._buffer, []
        if buffer and not self.is_closing():
            self._transport.write(buffer[0] if len(buffer) == 1 else b"".join(buffer))

    def close(self) -> None:
        self.flush()
        if self._keeps_reading is not None and self._keeps_reading():
            return
        if self.on_unsent is not None and not self.is_closing() and self._transport.get_write_buffer_size():
            self.on_unsent()
        self._transport.close()

    def reset(self) -> None:
        """Close without sending the rest; the client's system is told. `abort` alone would leave it to the kernel."""
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()
