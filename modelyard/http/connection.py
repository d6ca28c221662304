"""A connection that bounds what a client may send before its headers are complete, in bytes and in time.

uvicorn's httptools protocol has neither limit: a client that never ends its headers would hold memory for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_PATIENCE_S = 30.0
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_BODY = (
    b'{"error":{"message":"the request headers are too large (http.max_header_bytes)",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)


class BoundedHttp(HttpToolsProtocol):
    max_header_bytes = 64 * 1024

    @classmethod
    def bounded(cls, max_header_bytes: int) -> type[BoundedHttp]:
        return type("BoundedHttp", (cls,), {"max_header_bytes": max_header_bytes})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes, self._reading_headers = 0, True
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience = self.loop.call_later(_PATIENCE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                self.transport.write(_TOO_LARGE % (len(_BODY), _BODY))
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes, self._reading_headers = 0, True
        if self._patience is None:
            self._patience = self.loop.call_later(_PATIENCE_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._reading_headers = False
        self._calm()
        super().on_headers_complete()

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
