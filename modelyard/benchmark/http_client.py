"""The HTTP/1.1 client of the load generator: raw sockets, so that it costs far less than the server it measures.

A response is kept as it arrives, with the time of every read, and interpreted after its last byte: parsing events
must not delay the reads that are being timed.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httptools
import httpx
from msgspec import Struct

from modelyard.core.errors import InvalidRequest

_CONNECT_S = 10.0
_IDLE_S = 2.0  # an idle connection is not reused after this time
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class HttpResponse(Struct):
    """`parts` holds the body as it was read: (time, bytes). Times are of `time.perf_counter`.

    `error` says why the response is incomplete; its parts are what arrived until then.
    """

    sent: float
    status: int = 0
    headers: dict[str, str] = {}
    parts: list[tuple[float, bytes]] = []
    ended: float = 0.0
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.parts)


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
    """Requests to one server. Connections are reused if `keep_alive`.

    By default only TLS connections are: llama-server closes a connection after each stream without notice, and a
    request sent on it at that moment would look like a failure of the server.
    """

    def __init__(self, url: str, *, key: str | None = None, keep_alive: bool | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(parts):
            raise InvalidRequest(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidRequest("the API key has characters that an HTTP header must not have")
        self._host = parts.hostname
        self._tls = httpx.create_ssl_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._proxy = _proxy_for(parts)
        self._keep_alive = self._tls is not None if keep_alive is None else keep_alive
        self._idle: list[HttpConnection] = []
        self.connections: set[HttpConnection] = set()  # with a request in flight
        self._headers = {"Host": parts.netloc.rpartition("@")[2]}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._origin = ""
        if self._proxy is not None and self._tls is None:  # it gets the whole URL; TLS goes through a tunnel
            self._origin = f"http://{parts.netloc}"
            self._headers |= _proxy_authorization(self._proxy)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, to be sent once or many times."""
        headers = self._headers
        if method == "POST":
            headers = headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
        return _head(f"{method} {self._origin}{path}", headers) + body

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
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await self._open()
        except TimeoutError:
            raise OSError(f"no connection within {_CONNECT_S:g} s") from None

    async def _open(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        if self._proxy is None or self._tls is None:
            host, port = self._host, self._port
            if self._proxy is not None:
                host, port = self._proxy.hostname or "", self._proxy.port or 80
            return (await loop.create_connection(HttpConnection, host, port, ssl=self._tls))[1]
        reader, writer = await asyncio.open_connection(self._proxy.hostname, self._proxy.port or 80)
        target = f"{self._host}:{self._port}"
        headers = {"Host": target, **_proxy_authorization(self._proxy)}
        writer.write(_head(f"CONNECT {target}", headers))
        try:
            status = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0].decode("latin-1")
        except asyncio.IncompleteReadError:
            status = "no response"
        if " 200" not in status:
            writer.close()
            raise OSError(f"the proxy refused the connection: {status}")
        connection = HttpConnection()
        tunnel = await loop.start_tls(writer.transport, connection, self._tls, server_hostname=self._host)
        if tunnel is None:
            raise OSError("the TLS handshake failed")
        connection.connection_made(tunnel)
        return connection

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


def _head(request_line: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{request_line} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _proxy_for(parts: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for this URL; none for this machine."""
    host = parts.hostname or ""
    if host in _LOCAL_HOSTS or proxy_bypass(host):
        return None
    proxies = getproxies()
    url = proxies.get(parts.scheme) or proxies.get("all")
    return urlsplit(url if "://" in url else f"http://{url}") if url else None


def _proxy_authorization(proxy: SplitResult) -> Mapping[str, str]:
    if proxy.username is None:
        return {}
    credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}
