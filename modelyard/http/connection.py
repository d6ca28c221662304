"""A client connection: uvicorn's, with limits on what a client may send before it gets a reply.

uvicorn bounds neither the size of the headers nor the time they take, so a client could hold memory for ever; and it
refuses invalid HTTP in plain text, where our clients expect JSON. This class adds both through the callbacks of the
HTTP parser, and coalesces writes.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.http.disconnect import DisconnectCallbacks, offer_callbacks, withdraw_callbacks
from modelyard.http.errors import write_error
from modelyard.http.request_context import RequestContext
from modelyard.http.write_coalescer import CoalescingTransport, WriteCoalescer

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
