"""The inference endpoints: one handler for every protocol. It reads the body, starts the request in the gateway and
writes its events, as a stream or as a whole reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from modelyard.core.errors import ModelyardError, Unsupported
from modelyard.core.events import Event, Failed, Finished, ReplyBuilder, Started
from modelyard.core.protocol import EventWriter, WireError, WireProtocol
from modelyard.core.request import Request
from modelyard.gateway.background_responses import BackgroundObserver
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.request_work import RequestWork, end_of_stage
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.gateway.stream import Stream
from modelyard.http.connection import LARGE_BYTES, cancel_on_disconnect, ping_on_half_close
from modelyard.http.errors import as_modelyard_error, public_error
from modelyard.http.request_context import RequestContext, read_body, send_error, send_json
from modelyard.http.settings import HttpSettings
from modelyard.protocols.common.dialects import DEFAULT_DIALECT
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.sse import comment
from modelyard.telemetry.request_capture import CaptureSink, RequestCapture

_EVENT_STREAM = b"text/event-stream; charset=utf-8"  # unless a writer has a content type of its own
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
)


PROGRESS_HEADER = "x-modelyard-progress"  # of a request whose stream tells its progress before the first output
_PROGRESS_S = 0.2


class Exchange(Struct):
    """One HTTP request and its reply."""

    scope: Scope
    receive: Receive
    send: Send
    context: RequestContext
    capture: RequestCapture | None
    stored: StoredResponses | None


class InferenceEndpoint:
    """An ASGI app for one protocol. `stored` are the responses that it stores, `dialect` that of requests that choose
    none, where its path has several."""

    notes_status = True

    def __init__(
        self,
        protocol: WireProtocol,
        gateway: Gateway,
        settings: HttpSettings,
        captures: CaptureSink | None = None,
        stored: StoredResponses | None = None,
        dialect: str | None = None,
    ) -> None:
        self._protocol, self._gateway, self._settings, self._captures = protocol, gateway, settings, captures
        self._stored, self._dialect = stored, dialect
        self._pings = PingTimer(settings.keepalive_s)

    def with_stored(self, stored: StoredResponses) -> InferenceEndpoint:
        """The same endpoint for a WebSocket connection, which has responses of its own."""
        made = copy(self)
        made._stored = stored
        return made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, context, request, stored = self._gateway, RequestContext.of(scope), None, self._stored
        capture = self._captures.start(context.trace) if self._captures is not None else None
        exchange = Exchange(scope, receive, send, context, capture, stored)
        gateway.metrics.active += 1
        try:
            body = await read_body(receive, context, self._settings)
            if capture is not None:
                capture.request(body)
            caller = context.caller()
            work = RequestWork(len(body), caller.deadline, context.reservation)
            stop_watching = cancel_on_disconnect(scope, receive, work.cancel) if len(body) > LARGE_BYTES else None
            try:
                headers = context.headers
                if self._dialect is not None:
                    headers = {**headers, DEFAULT_DIALECT: self._dialect}
                request = await gateway.read(self._protocol, body, headers, context.key, work, stored)
                if request.load_only:
                    await self._load(request, exchange)
                    return
                prepared = await gateway.prepare(request, caller, work)
            finally:
                if stop_watching is not None:
                    stop_watching()
            source = gateway.start(prepared, capture)
            if stored is not None or request.repeated is not None:  # such a reply shows the values that were used
                request = replace(request, sampling=prepared.sampling)
            if prepared.edits:
                request = replace(request, applied_edits=prepared.edits)
            if request.background:
                capture = None  # its run ends it
                await self._run_in_background(source, request, exchange)
                return
            await (self._stream if request.stream else self._reply)(source, request, exchange)
        except Exception as error:
            if context.status:
                raise
            await self._send_error(as_modelyard_error(error), request, exchange)
        finally:
            gateway.metrics.active -= 1
            if capture is not None:
                capture.close()

    async def _load(self, request: Request, exchange: Exchange) -> None:
        reply = await self._gateway.load(request, exchange.context.caller())
        await send_json(exchange.send, exchange.context, 200, self._protocol.write_reply([reply], request))

    async def _reply(self, source: Stream, request: Request, exchange: Exchange) -> None:
        context = exchange.context
        stop_watching = cancel_on_disconnect(exchange.scope, exchange.receive, source.cancel)
        builders = [ReplyBuilder() for _ in range(source.prepared.choices)]
        try:
            async for choice, events in source:
                builders[choice].feed(events)
                if len(builders) == 1 and builders[0].finished:
                    break
        finally:
            stop_watching()
            source.close()
        await end_of_stage()  # scan
        context.read_result(source)
        replies = [builder.reply() for builder in builders]
        for reply in replies:
            context.finished(reply.finished)
        if exchange.stored is not None:
            finished = await exchange.stored.save(request, replies[0], context.key)
            replies[0] = replace(replies[0], finished=finished)
        body = self._protocol.write_reply(replies, request)
        if exchange.capture is not None:
            exchange.capture.response(body)
        await send_json(exchange.send, context, 200, body)

    def _stream(self, source: Stream, request: Request, exchange: Exchange) -> Awaitable[None]:
        context = exchange.context
        recorder = exchange.stored.recorder(request, context.key) if exchange.stored is not None else None

        def write_error(error: ModelyardError) -> WireError:
            return self._protocol.write_error(error, trace=context.trace, streaming=True, request=request)

        writer = self._protocol.writer(request, context.trace)
        if hasattr(writer, "clock"):
            writer.clock = time.time
        stream = EventStream(source, writer, write_error, exchange, self._pings, recorder)
        if context.headers.get(PROGRESS_HEADER) == "true":
            leases, running = self._gateway.leases, self._gateway.running
            stream.progress = lambda: running.progress(context.trace, leases.status())
        return stream.run()

    async def _run_in_background(self, source: Stream, request: Request, exchange: Exchange) -> None:
        """Answer at once, or send the events as long as the client reads them."""
        context, capture = exchange.context, exchange.capture
        background = None if exchange.stored is None else exchange.stored.background

        reservation, context.reservation = context.reservation, None  # its run returns it

        def on_end(events: bytes) -> None:
            if reservation is not None:
                reservation.release()
            if capture is not None:
                capture.response(events)
                capture.close()

        if background is None:
            source.close()
            on_end(b"")
            raise Unsupported("background: responses are not stored here", param="background")
        observer = BackgroundObserver(lambda error: public_error(error, context), on_end)
        id, response = await background.start(source, request, context.key, observer)
        if not request.stream:
            await send_json(exchange.send, context, 200, response)
            return
        events = background.events(id, context.key, -1, self._settings.keepalive_s)
        await send_stored_events(events, exchange.scope, exchange.receive, exchange.send)

    async def _send_error(self, error: ModelyardError, request: Request | None, exchange: Exchange) -> None:
        """Also for a cancelled request: the client may not have been the one to cancel it. If it has disconnected, the
        connection sends nothing."""
        context = exchange.context
        context.failed(error)
        error = public_error(error, context)
        streaming = request is not None and request.stream
        written = self._protocol.write_error(error, trace=context.trace, streaming=streaming, request=request)
        if exchange.capture is not None:
            exchange.capture.response(written.body)
        await send_error(exchange.send, context, written)


async def send_stored_events(events: AsyncIterator[bytes], scope: Scope, receive: Receive, send: Send) -> None:
    """The events of a background response, which goes on when the client leaves. A comment after a silence: another
    event would have a number that no other reader gets."""
    context = RequestContext.of(scope)

    async def write() -> None:
        headers = [*context.response_headers(_EVENT_STREAM), *_STREAM_HEADERS]
        async for data in events:
            if not context.status:
                context.status = 200
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data or b": waiting\n\n", "more_body": True})
        if not context.status:
            context.status = 200
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    writing = asyncio.get_running_loop().create_task(write())
    stop_watching = cancel_on_disconnect(scope, receive, writing.cancel)
    try:
        await asyncio.wait([writing])
    finally:
        stop_watching()
        writing.cancel()
    if not writing.cancelled():
        writing.result()


class PingTimer:
    """Lets streams ping before they were silent for `keepalive_s`. One timer for all of them: a timer of its own costs
    a short stream more than its events."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s, self._interval_s = keepalive_s, keepalive_s / 4
        self._streams: set[EventStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def discard(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    def _tick(self) -> None:
        self._timer = None
        latest = time.monotonic() - self._keepalive_s + self._interval_s
        for stream in self._streams:
            if stream.last_sent <= latest:  # at the next tick it would be late
                stream.ping()
        if self._streams:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)


class EventStream:
    """A streamed reply, with pings for a client that waits.

    Headers are sent with the first event, so that an early error has its real status, but not later than one
    keep-alive interval. The request's own task reads and writes. The connection watches whether the client reads.
    """

    def __init__(
        self,
        source: Stream,
        writer: EventWriter,
        write_error: Callable[[ModelyardError], WireError],
        exchange: Exchange,
        pings: PingTimer,
        recorder: Callable[[list[Event]], Awaitable[list[Event]]] | None = None,
    ) -> None:
        self._source, self._writer, self._write_error, self._exchange = source, writer, write_error, exchange
        self._context, self._send, self._capture = exchange.context, exchange.send, exchange.capture
        self._pings, self._recorder = pings, recorder
        self._content_type: bytes = getattr(writer, "content_type", _EVENT_STREAM)
        self._started = self._over = False
        self._sending = False  # a send may wait for the client to read
        self.last_sent = time.monotonic()
        self._ping: asyncio.Task[None] | None = None
        self.progress: Callable[[], dict[str, Any]] | None = None

    async def run(self) -> None:
        scope = self._exchange.scope
        stop_watching = cancel_on_disconnect(scope, self._exchange.receive, self._source.cancel)
        stop_pings = ping_on_half_close(scope, self.ping)
        self._pings.add(self)
        reporting = None
        if self.progress is not None and self._content_type == _EVENT_STREAM:
            reporting = asyncio.get_running_loop().create_task(self._report(self.progress))
        write, recorder = self._writer.write, self._recorder
        try:
            async for choice, events in self._source:
                if isinstance(last := events[-1], Failed):
                    self._context.failed(last.error)
                    events[-1] = last = Failed(public_error(last.error, self._context))
                    if self._ping is not None:
                        await self._finish_ping(self._ping)
                    if not self._started:
                        await self._refuse(last.error)
                        return
                elif isinstance(last, Finished):
                    self._context.finished(last)
                if reporting is not None and not isinstance(last, Started):
                    reporting.cancel()
                written = events if recorder is None else await recorder(events)
                if self._ping is not None:  # before the events are written: each frame has a number
                    await self._finish_ping(self._ping)
                data = b"".join([write(event, choice) for event in written])
                if not self._started:
                    await self._start()
                if data:
                    self._sending = True
                    await self._send(self._body(data))
                    self._sending = False
            if self._ping is not None:
                await self._finish_ping(self._ping)
            if not self._started:
                await self._start()
            self._sending = True
            await self._send(self._body(self._trailer() + self._writer.end(), last=True))
        finally:
            self._over = True
            if reporting is not None:
                reporting.cancel()
            self._pings.discard(self)
            stop_watching()
            stop_pings()
            self._context.read_result(self._source)  # for the log: headers sent by a ping came too early for it
            self._source.close()

    def _trailer(self) -> bytes:
        """What a header would have told, if the end were known at the start: a comment, which clients skip."""
        stopped = self._context.stopped
        return comment(f"x-modelyard-stopped: {stopped}") if stopped and self._content_type == _EVENT_STREAM else b""

    async def _refuse(self, error: ModelyardError) -> None:
        self._started = True
        written = self._write_error(error)
        if self._capture is not None:
            self._capture.response(written.body)
        await send_error(self._send, self._context, written)

    async def _finish_ping(self, ping: asyncio.Task[None]) -> None:
        """A ping in progress goes first: it may send the headers, and nothing may come between them and its body."""
        await asyncio.gather(ping, return_exceptions=True)
        self._ping = None

    async def _start(self) -> None:
        """Send the headers."""
        self._started = self._sending = True
        self._context.status = 200
        self._context.read_result(self._source)
        headers = [*self._context.response_headers(self._content_type), *_STREAM_HEADERS]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sending = False

    def _body(self, data: bytes, last: bool = False) -> Message:
        self.last_sent = time.monotonic()
        if self._capture is not None:
            self._capture.response(data)
        return {"type": "http.response.body", "body": data, "more_body": not last}

    async def _report(self, progress: Callable[[], dict[str, Any]]) -> None:
        """Comments, which clients skip: so every protocol has them."""
        told: dict[str, Any] = {}
        while not self._over:
            await asyncio.sleep(_PROGRESS_S)
            if (now := progress()) != told and now and self.ping(comment(f"{PROGRESS_HEADER}: {encode(now).decode()}")):
                told = now

    def ping(self, data: bytes = b"") -> bool:
        """Whether `data`, or what keeps a connection alive, is sent."""
        if self._over or self._sending or not (self._ping is None or self._ping.done()):
            return False
        self._ping = asyncio.get_running_loop().create_task(self._write_ping(data))
        return True

    async def _write_ping(self, data: bytes) -> None:
        if not self._started:
            await self._start()
        if data := data or self._writer.keepalive():
            self._sending = True
            await self._send(self._body(data))
            self._sending = False
