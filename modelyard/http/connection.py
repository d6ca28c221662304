"""A client connection: uvicorn's, with limits on what a client may send and on how long it may read nothing.

uvicorn bounds neither the size of the headers nor the time they take nor the time in which nothing is read, so a client
could hold memory for ever; and it refuses invalid HTTP in plain text, where our clients expect JSON. This class adds
that through the callbacks of the HTTP parser and of the transport, and coalesces writes. It also serves clients that
uvicorn does not: those that offer another protocol than WebSocket, that close their side after the request, or that
know only HTTP/1.0.

A WebSocket connection is uvicorn's, without the errors that it logs for what a client does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.http.errors import write_error
from modelyard.http.local_user import local_user
from modelyard.http.request_context import RequestContext
from modelyard.telemetry.log import log_event
from modelyard.write_coalescing import CoalescingTransport, WriteCoalescer

log = logging.getLogger("modelyard.http")

# --- disconnects: work is cancelled the moment its connection is lost -------------------------------------------------

Callbacks = set[Callable[[], object]]


class ClientConnection:
    """What a connection tells about its client beyond ASGI's messages, as an extension in the scope of its requests.
    Under another ASGI server there is none: a task waits for `http.disconnect` instead.

    A client that has closed its side may still read, or be gone: only an answer to something sent tells. A stream adds
    how to send a ping to `on_half_close`. `find_user` tells which user of the machine the client is.
    """

    __slots__ = ("find_user", "is_lost", "on_disconnect", "on_half_close")
    NAME = "modelyard.client"

    def __init__(self, find_user: Callable[[], str] | None = None) -> None:
        self.find_user, self.is_lost = find_user, False
        self.on_disconnect: Callbacks = set()
        self.on_half_close: Callbacks = set()

    @property
    def extensions(self) -> dict[str, Any]:
        """For the scope of a request."""
        return {self.NAME: self}

    @classmethod
    def of(cls, scope: Scope) -> ClientConnection | None:
        found: ClientConnection | None = scope.get("extensions", {}).get(cls.NAME)
        return found

    def lose(self) -> None:
        """Work that is watched from now on asks `receive`, which reports the disconnect."""
        self.is_lost = True
        for callback in tuple(self.on_disconnect):
            callback()


def cancel_on_disconnect(scope: Scope, receive: Receive, cancel: Callable[[], object]) -> Callable[[], object]:
    """Cancel the work when the client disconnects. Call the returned function when the work is done."""
    client = ClientConnection.of(scope)
    if client is None or client.is_lost:
        return asyncio.get_running_loop().create_task(_wait(receive, cancel)).cancel
    client.on_disconnect.add(cancel)
    return partial(client.on_disconnect.discard, cancel)


async def _wait(receive: Receive, cancel: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    cancel()


LARGE_BYTES = 20_000  # of a body; less is handled within a few milliseconds, and no disconnect cancels it


def ping_on_half_close(scope: Scope, ping: Callable[[], object]) -> Callable[[], object]:
    """Call `ping` to find out whether the client still reads. Call the returned function at the end of the stream."""
    client = ClientConnection.of(scope)
    pings = set[Callable[[], object]]() if client is None else client.on_half_close
    pings.add(ping)
    return partial(pings.discard, ping)


def user_of(scope: Scope) -> Callable[[], str]:
    """Tells which user of the machine the client is."""
    client = ClientConnection.of(scope)
    asked = None if client is None else client.find_user
    return asked or partial(local_user, scope.get("client"), scope.get("server"))


# --- the connection ---------------------------------------------------------------------------------------------------

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_S, _MAX_PROBE_S = 0.01, 5.0
_MAX_UNPAUSED = 16  # requests that wait for the replies to those before them
MIN_BODY_BYTES = 32 * 1024  # that come within `receive_timeout_s`, or the end: about 1 KiB/s is enough for any upload
_MAX_UNREAD_S = 20.0  # for which the rest of a refused body is read

_ERROR_HEAD = "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"


class LimitedConnection(HttpToolsProtocol):
    """`receive_timeout_s` limits the time for all headers together, and for each MIN_BODY_BYTES of the body.
    `stall_s` limits the time in which a client reads nothing of what it is sent."""

    max_header_bytes = 64 * 1024
    receive_timeout_s = 30.0
    stall_s = 120.0
    coalescer: WriteCoalescer

    @classmethod
    def configured(cls, max_header_bytes: int, stall_s: float) -> type[LimitedConnection]:
        """The class for one server: its connections share one write coalescer."""
        attributes = {"max_header_bytes": max_header_bytes, "stall_s": stall_s, "coalescer": WriteCoalescer()}
        return type("LimitedConnection", (cls,), attributes)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url, self.headers = b"", []
        self._header_bytes, self._in_headers, self._in_body = 0, True, True
        self._message_ended = False  # a message ended in the data that is being parsed
        self._body_advanced = False  # headers or a part of a body ended in it
        self._body_bytes = 0  # since the timer was started
        self._fault = "Invalid HTTP request received."
        self._refusal: bytes | None = None  # the last thing that is sent; input is ignored from here on
        self._receive_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._client = ClientConnection(self._find_user)
        self._user: str | None = None
        self._earlier: list[RequestResponseCycle] = []  # replies that come before that of `cycle`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._coalescing = CoalescingTransport(
            transport, self.loop, self.coalescer, self._watch_reader, self._drops_body
        )
        super().connection_made(cast(asyncio.Transport, self._coalescing))
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        # uvicorn leaves its timer running after a reset, and with it the connection and its request in memory.
        for timer in (self._stall_timer, self._probe_timer, self._close_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        for cycle in self._earlier:  # uvicorn knows only the last one
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._client.lose()

    def _find_user(self) -> str:
        """Once for a connection: the other end belongs to one user."""
        if self._user is None:
            self._user = local_user(self.client, cast("tuple[str, int]", self.server))
        return self._user

    # --- receiving ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """The timer runs only while a request is incomplete; most requests arrive in one piece."""
        if self._refusal is not None or self._close_timer is not None:
            return
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._message_ended = self._body_advanced = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response(self._fault)
            return
        if not self._in_headers and not self._in_body:
            self._stop_timer()
        elif self._message_ended or self._body_advanced:  # how much of the data belongs to what follows is unknown
            self._header_bytes = 0
            if self._message_ended or self._body_bytes >= MIN_BODY_BYTES:
                self._body_bytes = 0
                self._start_timer()
        elif (size := self._header_bytes + len(data)) > self.max_header_bytes:
            message = f"the request headers are larger than {self.max_header_bytes} bytes (http.max_header_bytes)"
            self._refuse(431, TooLarge(message, code="headers_too_large"))
        else:
            self._header_bytes = size
            if self._receive_timer is None:
                self._start_timer()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._opens_websocket():
                    self._stop_timer()
                    self._in_headers = self._in_body = False
                    self._coalescing.on_unsent = None
                    self.scope["method"] = "GET"
                    self.handle_websocket_upgrade()
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # after `Connection: close` the old one reads nothing
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
            else:
                return

    def _opens_websocket(self) -> bool:
        """Nothing else is upgraded. Not behind a request that is still answered: the reply needs the connection."""
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self.ws_protocol_class is not None
            and [value.lower() for name, value in self.headers if name == b"upgrade"] == [b"websocket"]
            and any(name == b"sec-websocket-key" for name, _ in self.headers)
            and (self.cycle is None or self.cycle.response_complete)
        )

    def _head_without_upgrade(self) -> bytes:
        """The request's head without its offer of another protocol, which a server may ignore (RFC 9110, 7.8). The
        parser would skip the body and read it as the next request."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this server is no proxy")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            kept = _without_upgrade(value) if name == b"connection" else value
            if name != b"upgrade" and (kept or name != b"connection"):
                lines.append(b"%b: %b" % (name, kept))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # --- callbacks of the HTTP parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes, self._in_headers, self._in_body = 0, True, True

    def on_headers_complete(self) -> None:
        if fault := self._head_fault():
            self._fault = fault
            raise httptools.HttpParserError(fault)
        if self.parser.should_upgrade():
            return  # `_parse` decides
        scope: Any = self.scope
        scope["extensions"] = self._client.extensions
        before = self.cycle
        if self.parser.get_http_version() == "1.1":
            super().on_headers_complete()
        else:
            app = self.app
            self.app = reply = _UnchunkedReply(app)
            super().on_headers_complete()
            self.app = app
            reply.start(self.cycle)
        scope["headers"] = self.headers.copy()  # a trailer is no header (RFC 9110, 6.5.1)
        self._in_headers, self._body_advanced, self._body_bytes = False, True, MIN_BODY_BYTES
        if self.pipeline:
            self._earlier.append(before)
            if len(self.pipeline) <= _MAX_UNPAUSED:  # uvicorn pauses reading, and a disconnect would go unnoticed
                self.flow.resume_reading()

    def _head_fault(self) -> str | None:
        """What other servers and proxies may read differently than this one does."""
        names = [name for name, _ in self.headers]
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            return "a request has exactly one Host header"
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            return "the only Transfer-Encoding that is read here is chunked"
        is_listed = b"te" in names and any(b"chunked" in value.lower() for name, value in self.headers if name == b"te")
        return "TE does not list chunked (RFC 9110, 10.1.4)" if is_listed else None

    def on_body(self, body: bytes) -> None:
        self._body_advanced = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body, self._message_ended = False, True
        super().on_message_complete()
        if len(self.pipeline) <= _MAX_UNPAUSED:
            self.flow.resume_reading()  # uvicorn has paused it for a large body, and a disconnect would go unnoticed

    # --- a client that closes its side after the request ------------------------------------------------------------

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Continue while a reply is due. TLS has no such state."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            self.transport.close()  # after what is written but not sent yet
            return None
        cycle.keep_alive = False
        self._probe_timer = self.loop.call_later(_PROBE_S, self._probe, _PROBE_S)
        return True

    def _probe(self, delay: float) -> None:
        """Send something that changes nothing: if the client is gone, its system resets the connection, and the next
        write fails. Where nothing can be sent, a closed side means that it is gone."""
        if self.transport.is_closing():
            return
        cycle = next((cycle for cycle in self._earlier if not cycle.response_complete), self.cycle)
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        elif self._client.on_half_close:
            for ping in tuple(self._client.on_half_close):
                ping()
        elif not cycle.response_started:
            self.transport.close()
            return
        delay = min(2 * delay, _MAX_PROBE_S)
        self._probe_timer = self.loop.call_later(delay, self._probe, delay)

    # --- a client that does not send --------------------------------------------------------------------------------

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

    # --- a client that does not read --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None and not self.transport.is_closing():
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_reader(self) -> None:
        if self._stall_timer is None:
            self._unsent, self._read_at = self.transport.get_write_buffer_size(), self.loop.time()
            self._stall_timer = self.loop.call_later(self.stall_s / 4, self._check_reader)

    def _check_reader(self) -> None:
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        if unsent < self._unsent:
            self._read_at = now
        elif now - self._read_at >= self.stall_s:
            log_event(log, logging.WARNING, "a client does not read its reply: disconnected", unsent=unsent)
            self._coalescing.reset()
            return
        self._unsent = unsent
        self._stall_timer = self.loop.call_later(self.stall_s / 4, self._check_reader)

    # --- refusals -------------------------------------------------------------------------------------------------

    def _drops_body(self) -> bool:
        """Whether the connection stays open until the client has sent the rest of a body that was answered before it
        was read. With unread input the system would reset the connection, and most clients would never see why their
        body was refused."""
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_complete and cycle.more_body
        if not is_answered or self._close_timer is not None or self.transport.is_closing():
            return False
        self._stop_timer()
        self._close_timer = self.loop.call_later(_MAX_UNREAD_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        return True

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, status: int, error: ModelyardError) -> None:
        """Answer what never becomes a request, after the replies to the requests before it."""
        if self.transport.is_closing():
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        context = RequestContext(secrets.token_hex(12), self.url.decode("latin-1"), headers)
        body = write_error(error, context).body
        self._refusal = _ERROR_HEAD.format(status, HTTPStatus(status).phrase, len(body)).encode() + body
        cycle, is_body = self.cycle, self._in_body and not self._in_headers  # a broken body has a cycle of its own
        if is_body and self.pipeline:
            self.pipeline.popleft()  # it is the newest, and waits
        elif is_body and cycle.response_started:
            self.transport.close()
        elif is_body or cycle is None or cycle.response_complete:
            self._send_refusal(self._refusal)

    def _send_refusal(self, refusal: bytes) -> None:
        self.transport.write(refusal)
        self.transport.close()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if not is_last:
            return
        self._earlier.clear()
        if self._refusal is not None and not self.transport.is_closing():
            self._send_refusal(self._refusal)


def _without_upgrade(connection: bytes) -> bytes:
    options = [option.strip() for option in connection.split(b",")]
    return b", ".join(option for option in options if option.lower() not in (b"upgrade", b"http2-settings"))


class _UnchunkedReply:
    """The app for a client before HTTP/1.1, which does not know chunks or interim replies: the body ends with the
    connection. uvicorn writes chunks unless it counts down a content-length."""

    cycle: RequestResponseCycle

    def __init__(self, app: Any) -> None:
        self._app = app

    def start(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        cycle.keep_alive = cycle.waiting_for_100_continue = cycle.chunked_encoding = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_unchunked(message: Message) -> None:
            if message["type"] == "http.response.body":
                self.cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)


_NOT_UTF8 = 1007  # the code of a connection that is closed for it


class WebSocketConnection(WebSocketsSansIOProtocol):
    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # it was refused; uvicorn would report that the app sent nothing

    def send_receive_event_to_app(self) -> None:
        """Close the connection of a client whose text is not UTF-8; uvicorn would log a traceback as well."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(_NOT_UTF8)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()
