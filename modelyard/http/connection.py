"""A client connection: uvicorn's, with limits on what a client may send before it gets a reply.

uvicorn bounds neither the size of the headers nor the time they take, so a client could hold memory for ever; and it
refuses invalid HTTP in plain text, where our clients expect JSON. This class adds both through the callbacks of the
HTTP parser, and coalesces writes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol, cast

from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.http.errors import write_error
from modelyard.http.request_context import RequestContext

# --- write coalescing: everything written in one iteration of the event loop is one system call ----------------------


class WriteCoalescer:
    """The connections of one server that have data to send at the end of this iteration of the event loop."""

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
                loop.call_exception_handler({"message": "a reply could not be sent", "exception": error})


class CoalescingTransport:
    """A transport that buffers writes until the end of the event loop's iteration.

    Whole replies wait too: a client that gets its reply earlier sends its next request earlier, and the loop then runs
    one iteration per client instead of one for all. That costs a fifth of the throughput.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, coalescer: WriteCoalescer
    ) -> None:
        self._transport, self._loop, self._coalescer = transport, loop, coalescer
        self._buffer: list[bytes] = []
        self.is_closing = transport.is_closing  # called for every reply; `__getattr__` is slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._buffer:
            self._coalescer.schedule(self, self._loop)
        self._buffer.append(data)

    def flush(self) -> None:
        buffer, self._buffer = self._buffer, []
        if buffer and not self.is_closing():
            self._transport.write(buffer[0] if len(buffer) == 1 else b"".join(buffer))

    def close(self) -> None:
        self.flush()
        self._transport.close()


# --- disconnects: work is cancelled the moment its connection is lost -------------------------------------------------
#
# Our connection puts its callbacks into the request's scope. Under another ASGI server a task waits for
# `http.disconnect` instead.

_SCOPE_KEY = "modelyard.on_disconnect"

DisconnectCallbacks = set[Callable[[], None]]


class Cancellable(Protocol):
    def cancel(self) -> None: ...


def offer_callbacks(scope: Scope, callbacks: DisconnectCallbacks) -> None:
    scope[_SCOPE_KEY] = callbacks


def withdraw_callbacks(scope: Scope) -> None:
    """The connection is lost: a later `cancel_on_disconnect` must ask `receive`, which reports it."""
    scope.pop(_SCOPE_KEY, None)


def cancel_on_disconnect(scope: Scope, receive: Receive, work: Cancellable) -> Callable[[], object]:
    """Cancel the work when the client disconnects. Call the returned function when the work is done."""
    callbacks: DisconnectCallbacks | None = scope.get(_SCOPE_KEY)
    if callbacks is None:
        return asyncio.get_running_loop().create_task(_wait(receive, work)).cancel
    cancel = work.cancel
    callbacks.add(cancel)
    return lambda: callbacks.discard(cancel)


async def _wait(receive: Receive, work: Cancellable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


_ERROR_HEAD = "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"


class LimitedConnection(HttpToolsProtocol):
    """`receive_timeout_s` limits the time for all headers together, and each silence in the body that follows."""

    max_header_bytes = 64 * 1024
    receive_timeout_s = 30.0
    coalescer: WriteCoalescer

    @classmethod
    def configured(cls, max_header_bytes: int) -> type[LimitedConnection]:
        """The class for one server: its connections share one write coalescer."""
        attributes = {"max_header_bytes": max_header_bytes, "coalescer": WriteCoalescer()}
        return type("LimitedConnection", (cls,), attributes)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url, self.headers = b"", []
        self._header_bytes, self._in_headers, self._in_body = 0, True, True
        self._receive_timer: asyncio.TimerHandle | None = None
        self._on_disconnect: DisconnectCallbacks = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, CoalescingTransport(transport, self.loop, self.coalescer)))
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        for callback in tuple(self._on_disconnect):
            callback()
        scope: Any = self.scope
        if scope is not None:
            withdraw_callbacks(scope)

    def data_received(self, data: bytes) -> None:
        """The timer runs only while a request is incomplete; most requests arrive in one piece."""
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                message = f"the request headers are larger than {self.max_header_bytes} bytes (http.max_header_bytes)"
                self._refuse(431, TooLarge(message, code="headers_too_large"))
            elif self._receive_timer is None:
                self._start_timer()
        elif self._in_body:
            self._start_timer()
        else:
            self._stop_timer()

    # --- callbacks of the HTTP parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes, self._in_headers, self._in_body = 0, True, True

    def on_headers_complete(self) -> None:
        self._in_headers = False
        scope: Any = self.scope
        offer_callbacks(scope, self._on_disconnect)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    # --- limits ---------------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        self._stop_timer()
        self._receive_timer = self.loop.call_later(self.receive_timeout_s, self._on_timeout)

    def _on_timeout(self) -> None:
        if self.transport.is_reading():
            self.transport.close()
        else:  # the server has paused reading: the silence is not the client's
            self._start_timer()

    def _stop_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, status: int, error: ModelyardError) -> None:
        """Answer what never becomes a request."""
        if self.transport.is_closing():
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        context = RequestContext(secrets.token_hex(12), self.url.decode("latin-1"), headers)
        body = write_error(error, context).body
        self.transport.write(_ERROR_HEAD.format(status, HTTPStatus(status).phrase, len(body)).encode() + body)
        self.transport.close()
