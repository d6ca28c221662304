"""An HTTP/1.1 client on raw sockets, for load of many requests: it costs far less than the server that it measures.

A response is kept as it arrives, with the time of every read, and interpreted after its last byte: parsing events
must not delay the reads that are being timed.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

from modelyard_bench.http_client import HttpResponse

_IDLE_S = 2.0  # an idle connection is not reused after this time


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time. `response` is also readable while it arrives."""

    def __init__(self) -> None:
        self.response = HttpResponse(0.0)
        self.idle_since = 0.0
        self.is_open = True
        self._now = 0.0
        self._done: asyncio.Future[None] | None = None
        self._has_length = False  # by content-length or chunked encoding; otherwise the body ends with the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes, response: HttpResponse) -> None:
        """Send a request and fill in its response."""
        self.response, self._has_length = response, False
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        if self.is_open:
            self._transport.write(request)
        else:
            self._finish("the connection broke before the request was sent")
        await self._done

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"the connection broke: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        reason = error or "the server closed it before the response was complete"
        self._finish(None if self.response.status and not self._has_length else f"the connection broke: {reason}")

    def _finish(self, error: str | None = None) -> None:
        if self._done is not None and not self._done.done():
            self.response.ended, self.response.error = time.perf_counter(), error
            self._done.set_result(None)

    # Callbacks of httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()
        self._has_length = not self.response.headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    def on_body(self, body: bytes) -> None:
        self.response.parts.append((self._now, body))

    def on_message_complete(self) -> None:
        if self._has_length:
            self._finish()


class HttpClient:
    """Requests to one server of this machine. Connections are reused if `keep_alive`: llama-server closes one after
    each stream without notice."""

    def __init__(self, url: str, *, key: str | None = None, keep_alive: bool = False) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._keep_alive = parts.hostname or "", parts.port or 80, keep_alive
        self._idle: list[HttpConnection] = []
        self.connections: set[HttpConnection] = set()  # with a request in flight
        self._headers = {"Host": parts.netloc} | ({"Authorization": f"Bearer {key}"} if key else {})

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, to be sent once or many times."""
        headers = self._headers
        if method == "POST":
            headers = headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + body

    async def send(self, request: bytes, limit_s: float) -> HttpResponse:
        """Never raises for a failure of the connection or the time limit: the response has the `error`."""
        response = HttpResponse(time.perf_counter())
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._connect()
                self.connections.add(connection)
                await connection.exchange(request, response)
        except TimeoutError:
            response.error = f"not finished within {limit_s:g} s"
        except ConnectionRefusedError:
            response.error = "connection refused"
        except OSError as error:
            response.error = f"cannot connect: {error}"
        finally:
            is_complete = response.ended > 0 and response.error is None
            response.ended = response.ended or time.perf_counter()
            if connection is not None:
                self._release(connection, is_complete)
        return response

    async def _connect(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.perf_counter() - connection.idle_since < _IDLE_S:
                return connection
            connection.close()
        return (await asyncio.get_running_loop().create_connection(HttpConnection, self._host, self._port))[1]

    def _release(self, connection: HttpConnection, is_complete: bool) -> None:
        self.connections.discard(connection)
        closes = connection.response.headers.get("connection", "").lower() == "close"
        if self._keep_alive and connection.is_open and is_complete and not closes:
            connection.idle_since = time.perf_counter()
            self._idle.append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        for connection in (*self._idle, *self.connections):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports are closed in the next iteration of the loop
