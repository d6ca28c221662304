"""A connection that bounds what a client may send before it is answered, in bytes and in time.

uvicorn's httptools protocol has no such limits: a client that never ends its headers would hold memory for ever. And
it refuses what is not HTTP in plain text: here every refusal has a protocol's own shape.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.http.errors import written
from modelyard.http.farewell import Farewells, enlist, withdraw
from modelyard.http.outgoing import Gathering
from modelyard.http.together import introduce
from modelyard.http.visit import Visit

_HEAD = "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """`patience_s` is for all headers together, and for each silence in the body that follows."""

    max_header_bytes = 64 * 1024
    patience_s = 30.0

    @classmethod
    def bounded(cls, max_header_bytes: int) -> type[BoundedHttp]:
        return type("BoundedHttp", (cls,), {"max_header_bytes": max_header_bytes})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url, self.headers = b"", []
        self._header_bytes, self._reading_headers, self._reading_body = 0, True, True
        self._patience: asyncio.TimerHandle | None = None
        self._farewells: Farewells = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, Gathering(transport, self.loop))
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)
        for cancel in tuple(self._farewells):
            cancel()
        scope: Any = self.scope
        if scope is not None:
            withdraw(scope)

    def data_received(self, data: bytes) -> None:
        """A request that comes in one piece, as most do, never starts the clock."""
        HttpToolsProtocol.data_received(self, data)  # `super()` is an object more, four times a request
        if self._reading_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                too_large = f"the request headers are larger than {self.max_header_bytes} bytes (http.max_header_bytes)"
                self._refuse(431, TooLarge(too_large, code="headers_too_large"))
            elif self._patience is None:
                self._wait()
        elif self._reading_body:
            self._wait()
        elif self._patience is not None:
            self._calm()

    def on_message_begin(self) -> None:
        HttpToolsProtocol.on_message_begin(self)
        self._header_bytes, self._reading_headers, self._reading_body = 0, True, True

    def on_headers_complete(self) -> None:
        self._reading_headers = False
        scope: Any = self.scope
        enlist(scope, self._farewells)
        introduce(scope, self.tasks)
        HttpToolsProtocol.on_headers_complete(self)

    def on_message_complete(self) -> None:
        self._reading_body = False
        HttpToolsProtocol.on_message_complete(self)

    # --- running out of patience ----------------------------------------------------------------------------------

    def _wait(self) -> None:
        self._calm()
        self._patience = self.loop.call_later(self.patience_s, self._give_up)

    def _give_up(self) -> None:
        if self.flow.read_paused:  # the silence is ours
            self._wait()
        else:
            self.transport.close()

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    # --- refusing what never becomes a request --------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, status: int, error: ModelyardError) -> None:
        if self.transport.is_closing():
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        body = written(error, Visit(secrets.token_hex(12), self.url.decode("latin-1"), headers)).body
        self.transport.write(_HEAD.format(status, HTTPStatus(status).phrase, len(body)).encode() + body)
        self.transport.close()
