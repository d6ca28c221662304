"""The HTTP client for upstreams: a request and its response on a connection of the pool, with httptools as the parser.

The connections are in `upstream_connection.py`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import quote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from modelyard import __version__
from modelyard.engines.upstream_connection import (
    MAX_HEADER_BYTES,
    ClientError,
    Connection,
    ConnectionLost,
    ConnectionPool,
    Origin,
)
from modelyard.telemetry.tracing import current_traceparent

_MAX_BUFFERED = 256 << 10  # bytes of a body that wait for the reader before the connection is paused
_MAX_UNPACKED = 1 << 20  # bytes of a compressed body that are read at a time: 256 KiB of it can be 256 MiB
# Small servers end lines with LF alone, or write spaces where none belong. An upstream is configured, not a stranger.
_LENIENCIES = {
    "lenient_headers": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
_ANY_ZLIB_HEADER = 47  # gzip or zlib, whichever the data begins with
_KEPT_IN_PATHS = "/%:@!$&'()*+,;=~?-._[]"  # what stands for itself, or is encoded already
_DEFAULT_HEADERS = {"Accept": "*/*", "User-Agent": f"modelyard/{__version__}"}


class IncompleteResponse(ClientError):
    pass


class InvalidResponse(ClientError):
    pass


class ReadTimeout(ClientError):
    pass


class _Unpacker(Protocol):
    """What `zlib.decompressobj` returns."""

    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


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
        """`timeout` is in seconds without data, before and during a response."""
        self._base_url, self._origin = base_url, Origin.of(base_url)
        self._proxy = None if proxy is None else Origin.of(proxy)
        self._pool = ConnectionPool(self._origin, proxy=self._proxy, socket=socket, keep_alive=keep_alive)
        self._timeout = timeout
        self._lines = self._header_lines(headers, keep_alive)
        self._heads: dict[tuple[str, str], bytes] = {}

    async def close(self) -> None:
        self._pool.close()

    async def send(self, method: str, path: str, body: bytes = b"") -> ClientResponse:
        """The response whose status and headers have arrived. Raises ClientError.

        A server may close an idle connection while a request is on its way to it. So if a connection that was used
        before is lost without a byte of a response, the request is sent again on another one, but only once: it may
        also be what ends the server's processes.
        """
        head = self._heads.get((method, path))
        if head is None:
            head = self._heads[method, path] = self._head(method, path)
        parent = current_traceparent.get()
        trace = b"traceparent: %b\r\n" % parent.encode() if parent else b""
        for is_last in (False, True):
            connection = await self._pool.acquire()
            was_used = connection.was_used
            response = ClientResponse(connection, self._timeout)
            try:
                connection.transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), trace, body))
                if connection.early:
                    response.receive(connection.early)
                await response.wait_for_headers()
                return response
            except ConnectionLost:
                if is_last or not was_used or response.has_begun:
                    raise
            except BaseException:
                response.close()
                raise
        raise AssertionError("the last attempt returns or raises")

    # --- the head of a request ----------------------------------------------------------------------------------------

    @property
    def _is_forwarded(self) -> bool:
        """By a proxy that reads the request."""
        return self._proxy is not None and self._origin.scheme == "http"

    def _header_lines(self, headers: Mapping[str, str], keep_alive: bool) -> list[str]:
        given = {name.lower() for name in headers}
        own = {"Host": self._origin.netloc, **_DEFAULT_HEADERS}
        own |= {} if keep_alive else {"Connection": "close"}
        own |= {"Authorization": self._origin.authorization} if self._origin.authorization else {}
        if self._is_forwarded and self._proxy is not None and self._proxy.authorization:
            own["Proxy-Authorization"] = self._proxy.authorization
        every = {name: value for name, value in own.items() if name.lower() not in given} | dict(headers)
        return [f"{name}: {value}" for name, value in every.items() if name.lower() != "content-length"]

    def _head(self, method: str, path: str) -> bytes:
        """Everything before the value of Content-Length."""
        parts = urlsplit(self._base_url + path)
        target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_KEPT_IN_PATHS)
        target = f"http://{self._origin.netloc}{target}" if self._is_forwarded else target
        lines = [f"{method} {target} HTTP/1.1", *self._lines]
        if any(separator in line for line in lines for separator in "\r\n\0"):
            raise ValueError("a header contains a line break")
        return "\r\n".join([*lines, "Content-Length: "]).encode()


class ClientResponse:
    """Gives the connection back to the pool when it has ended. Close it if it is not read to its end."""

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self.status = 0  # until the headers have arrived
        self.headers: dict[str, str] = {}  # names in lower case
        self._connection: Connection | None = connection
        self._transport = connection.transport
        connection.response, connection.was_used = self, True
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_complete = self._keeps_alive = self._is_paused = False
        self._has_surplus = bool(connection.early)  # the response to this request may still come, behind another
        self._chunks: list[bytes] = []
        self._buffered = self._header_bytes = 0
        self._unpacker: _Unpacker | None = None
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
            if (unpacker := self._unpacker) is not None and unpacker.unconsumed_tail:
                if data := self._unpacked(unpacker, unpacker.unconsumed_tail):
                    return data
            elif chunks := self._chunks:
                data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                chunks.clear()
                self._buffered = 0
                if self._is_paused:
                    self._resume()
                if unpacker is not None:
                    data = self._unpacked(unpacker, data)
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
        is_unpacked = self._unpacker is None or not self._unpacker.unconsumed_tail
        return self._connection is None and not self._chunks and is_unpacked

    def close(self) -> None:
        """Closes the connection if the response has not ended, which tells the upstream that nobody reads it."""
        self._end(reusable=False)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _unpacked(self, unpacker: _Unpacker, data: bytes) -> bytes:
        try:
            return unpacker.decompress(data, _MAX_UNPACKED)
        except zlib.error as error:
            self._unpacker = None
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
        self._heard_at, before = self._loop.time(), len(self._chunks)
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
        elif not self.status or len(self._chunks) == before:  # headers, or what follows a body
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._fail(InvalidResponse(f"more than {MAX_HEADER_BYTES} bytes of headers"))
            elif self.status:
                self._wake()
        else:
            self._header_bytes = 0
            self._buffered += len(data)
            if self._buffered > _MAX_BUFFERED and self._chunks and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
            self._wake()

    def lose_connection(self, error: BaseException | None) -> None:
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        if not self.status:
            self._fail(ConnectionLost(str(error or "no response")))
        elif has_length or error is not None:
            self._fail(IncompleteResponse(str(error or "the answer is not complete")))
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
            self._fail(ReadTimeout("nothing was sent for too long"))

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
        connection.response = None
        if reusable:
            connection.release()
        else:
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
            self._unpacker = zlib.decompressobj(_ANY_ZLIB_HEADER)

    def on_message_complete(self) -> None:
        if self._parser is None or not self.status:
            self._raw_headers.clear()
        else:
            self._is_complete, self._keeps_alive = True, self._parser.should_keep_alive()
