"""The HTTP client for upstreams.

aiohttp resolves names, connects, speaks TLS and to proxies, and keeps the pool of connections. A request and its
response on a connection are here, with httptools as the parser: a forwarded request takes 0.7 of the CPU time that it
takes with aiohttp's own.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import certifi
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from yarl import URL

from modelyard.core.errors import InvalidRequest
from modelyard.write_coalescing import CoalescingTransport, WriteCoalescer

_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 15.0
_MAX_HEADER_BYTES = 64 << 10
_MAX_BUFFERED = 256 << 10  # bytes of a body that wait for the reader before the connection is paused
# Small servers end lines with LF alone, or write spaces where none belong. An upstream is configured, not a stranger.
_LENIENCIES = {
    "lenient_headers": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
_ANY_ZLIB_HEADER = 47  # gzip or zlib, whichever the data begins with


class InvalidResponse(aiohttp.ClientError):
    """The upstream sent what is not HTTP/1.1."""


class UpstreamClient:
    """Create it on the event loop that uses it. `proxy` and the address may contain a user name and a password."""

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str],
        proxy: str | None = None,
        socket: str | None = None,
        timeout: float | None = None,
        keep_alive: bool = True,
    ) -> None:
        self._base_url, self._headers = base_url, headers
        self._proxy = None if proxy is None else URL(proxy)
        self._read_timeout = timeout
        self._timeout = aiohttp.ClientTimeout(connect=timeout, sock_connect=_CONNECT_TIMEOUT_S)
        limits: dict[str, Any] = {"limit": 0}
        limits |= {"keepalive_timeout": _KEEPALIVE_S} if keep_alive else {"force_close": True}
        self._pool: aiohttp.BaseConnector
        if socket:
            self._pool = aiohttp.UnixConnector(socket, **limits)
        else:
            tls = _tls_context() if base_url.startswith("https:") else True
            self._pool = aiohttp.TCPConnector(ssl=tls, **limits)
        # Through a proxy, aiohttp starts TLS on the transport of the connection, which must be the event loop's own.
        coalescer = WriteCoalescer() if proxy is None else None
        self._pool._factory = cast(Any, partial(_Connection, asyncio.get_running_loop(), coalescer))
        self._heads: dict[tuple[str, str], _RequestHead] = {}

    async def close(self) -> None:
        await self._pool.close()

    async def send(self, method: str, path: str, body: bytes = b"") -> ClientResponse:
        """The response whose status and headers have arrived. Raises aiohttp's errors.

        A server may close an idle connection while a request is on its way to it. So if a connection that was used
        before is lost without a byte of a response, the request is sent again on another one, but only once: it may
        also be what ends the server's processes.
        """
        head = self._heads.get((method, path))
        if head is None:
            url = URL(self._base_url + path)
            head = self._heads[method, path] = _RequestHead(method, url, self._headers, self._proxy, self._pool)
        for is_last in (False, True):
            try:
                connection = await self._pool.connect(head.request, [], self._timeout)
            except TimeoutError as error:
                raise aiohttp.ConnectionTimeoutError from error
            if connection.transport is None:  # lost as soon as it was made
                connection.close()
                raise aiohttp.ServerDisconnectedError
            protocol = cast(_Connection, connection.protocol)
            was_used = protocol.was_used
            response = ClientResponse(connection, connection.transport, self._read_timeout)
            try:
                connection.transport.write(head.encode(len(body)) + body)
                if protocol.early:
                    response.receive(protocol.early)
                await response.wait_for_headers()
                return response
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if is_last or not was_used or response.has_begun:
                    raise
            except BaseException:
                response.close()
                raise
        raise AssertionError("the last attempt returns or raises")


class _RequestHead:
    """A request without its body, prepared once for each path. `request` is what aiohttp connects for."""

    def __init__(
        self, method: str, url: URL, headers: Mapping[str, str], proxy: URL | None, connector: aiohttp.BaseConnector
    ) -> None:
        self.request = aiohttp.ClientRequest(
            method,
            url.with_user(None),
            headers=headers,
            auth=aiohttp.BasicAuth.from_url(url),
            proxy=None if proxy is None else proxy.with_user(None),
            proxy_auth=None if proxy is None else aiohttp.BasicAuth.from_url(proxy),
            loop=asyncio.get_running_loop(),
        )
        if connector.force_close:
            self.request.headers["Connection"] = "close"
        self._start: bytes | None = None

    def encode(self, length: int) -> bytes:
        """Call it with a connection: for some proxies, aiohttp adds a header when it connects."""
        if self._start is None:
            request = self.request
            is_forwarded = request.proxy is not None and not request.is_ssl()  # by a proxy that reads the request
            lines = [f"{request.method} {request.url if is_forwarded else request.url.raw_path_qs} HTTP/1.1"]
            lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() != "content-length"]
            if any(separator in line for line in lines for separator in "\r\n\0"):
                raise aiohttp.InvalidURL(request.url, "a header or the path contains a line break")
            self._start = "\r\n".join([*lines, "Content-Length: "]).encode()
        return b"%b%d\r\n\r\n" % (self._start, length)


class _Connection(ResponseHandler):
    """A connection of the pool. With a coalescer, requests that begin together are sent together; without one, aiohttp
    may speak to a proxy before the first request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coalescer: WriteCoalescer | None = None) -> None:
        super().__init__(loop)
        self.response: ClientResponse | None = None
        self.was_used = False
        self.early = b""  # what a server says before it is asked: of another protocol, or that it is too late
        self._coalescer = coalescer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._coalescer is not None:
            plain = cast(asyncio.Transport, transport)
            transport = cast(asyncio.Transport, CoalescingTransport(plain, self._loop, self._coalescer))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.response is not None:
            self.response.receive(data)
        elif self.was_used:
            self.close()  # nothing was requested: the next response would be another one's
        elif self._coalescer is None:
            super().data_received(data)  # a proxy answers aiohttp
        else:
            self.early = (self.early + data)[:_MAX_HEADER_BYTES]

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.response is not None:
            self.response.lose_connection(exc)


class ClientResponse:
    """Gives the connection back to the pool when it has ended. Close it if it is not read to its end.

    `timeout` is in seconds without data, before and during the response.
    """

    def __init__(self, connection: Connection, transport: asyncio.Transport, timeout: float | None) -> None:
        self.status = 0  # until the headers have arrived
        self.headers: dict[str, str] = {}  # names in lower case
        self._connection: Connection | None = connection
        self._transport = transport
        self._protocol = cast(_Connection, connection.protocol)
        self._protocol.response, self._protocol.was_used = self, True
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_complete = self._keeps_alive = self._has_surplus = self._is_paused = False
        self._chunks: list[bytes] = []
        self._buffered = self._header_bytes = 0
        self._decompress: Callable[[bytes], bytes] | None = None
        self._raw_headers: dict[bytes, bytes] = {}
        # Callbacks of the parser. As methods of a list and a dict, they are not Python calls.
        self.on_body, self.on_header = self._chunks.append, self._raw_headers.__setitem__
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(**_LENIENCIES)
        self._timeout, self._heard_at = timeout, self._loop.time()
        self._timer = None if timeout is None else self._loop.call_later(timeout, self._check_timeout)

    # --- the reader's side ------------------------------------------------------------------------------------------

    async def wait_for_headers(self) -> None:
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """Everything of the body that has arrived; empty at its end."""
        while True:
            if chunks := self._chunks:
                data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                chunks.clear()
                self._buffered = 0
                if self._is_paused:
                    self._resume()
                if self._decompress is not None:
                    data = self._decompressed(self._decompress, data)
                if data:
                    return data
            elif self._error is not None:
                raise self._error
            elif self._connection is None:
                return b""
            else:
                await self._wait()

    @property
    def has_begun(self) -> bool:
        return self._header_bytes > 0 or self.status != 0

    @property
    def is_read(self) -> bool:
        return self._connection is None and not self._chunks

    def close(self) -> None:
        """Closes the connection if the response has not ended, which tells the upstream that nobody reads it."""
        self._end(reusable=False)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _decompressed(self, decompress: Callable[[bytes], bytes], data: bytes) -> bytes:
        try:
            return decompress(data)
        except zlib.error as error:
            self._fail(InvalidResponse(str(error)))
            return b""

    def _resume(self) -> None:
        self._is_paused, self._heard_at = False, self._loop.time()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # --- the connection's side --------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        if (parser := self._parser) is None:
            return
        self._heard_at = self._loop.time()
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self._is_complete:
                self._fail(InvalidResponse(str(error)))
                return
            self._has_surplus = True
        if self._is_complete:
            is_sent = not self._transport.get_write_buffer_size()
            self._end(reusable=is_sent and not self._has_surplus and self._keeps_alive)
        elif not self.status:
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES:
                self._fail(InvalidResponse(f"more than {_MAX_HEADER_BYTES} bytes of headers"))
        else:
            self._buffered += len(data)
            if self._buffered > _MAX_BUFFERED and self._chunks and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
            self._wake()

    def lose_connection(self, error: BaseException | None) -> None:
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        if isinstance(error, OSError):
            self._fail(aiohttp.ClientOSError(*error.args))
        elif not self.status:
            self._fail(aiohttp.ServerDisconnectedError())
        elif has_length or error is not None:
            self._fail(aiohttp.ClientPayloadError("the answer is not complete"))
        else:
            self._end(reusable=False)  # the body ends with the connection

    def _check_timeout(self) -> None:
        if self._timeout is None:
            return
        now = self._loop.time()
        if self._is_paused:  # the reader is late, not the upstream
            self._heard_at = now
        if (left := self._heard_at + self._timeout - now) > 0:
            self._timer = self._loop.call_later(left, self._check_timeout)
        else:
            self._fail(aiohttp.SocketTimeoutError())

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._end(reusable=False)

    def _end(self, *, reusable: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._parser = None  # it refers to this object
        if self._timer is not None:
            self._timer.cancel()
        if self._is_paused:
            self._resume()
        self._protocol.response = None
        if reusable:
            connection.release()
        else:
            if self._transport.get_write_buffer_size():
                self._protocol.abort()  # `close` would wait until the rest is sent
            connection.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the parser's other callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:  # nobody has requested another one; the parser stops here
            raise InvalidResponse("data behind the response")

    def on_headers_complete(self) -> None:
        if self._parser is None or (status := self._parser.get_status_code()) < 200:
            return  # an interim response: the real one follows
        self.status = status
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._raw_headers.items()
        }
        if self.headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
            self._decompress = zlib.decompressobj(_ANY_ZLIB_HEADER).decompress

    def on_message_complete(self) -> None:
        if self._parser is None or not self.status:
            self._raw_headers.clear()
        else:
            self._is_complete, self._keeps_alive = True, self._parser.should_keep_alive()


# --- the environment --------------------------------------------------------------------------------------------------


def _tls_context() -> ssl.SSLContext:
    """The authorities of `SSL_CERT_FILE` or `SSL_CERT_DIR`, else those of the system and of certifi."""
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE") and not os.environ.get("SSL_CERT_DIR"):
        context.load_verify_locations(certifi.where())
    return context


def environment_proxy(url: str) -> str | None:
    """The proxy that `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` name for this address."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if (scheme := urlsplit(proxy).scheme) not in ("http", "https"):  # the address itself may hold a password
        raise InvalidRequest(
            f"the environment names a {scheme} proxy for {parts.hostname}, and only http and https proxies are "
            "supported; set NO_PROXY for this host or another proxy",
            code="proxy_unsupported",
        )
    return proxy
