"""The hot endpoints: one handler for every protocol, because a protocol is a value here."""

from __future__ import annotations

from collections.abc import Awaitable

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import Reply, ReplyBuilder
from modelyard.core.protocol import WireError, WireProtocol
from modelyard.core.request import Request
from modelyard.gateway import ChoiceStream, Gateway, SharedReader
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.http.disconnect import watch
from modelyard.http.errors import ours
from modelyard.http.request_context import RequestContext, aside, body_at_hand, read_body, respond, respond_error
from modelyard.http.settings import HttpSettings
from modelyard.http.sse import EventStream
from modelyard.http.stored_responses import StoredResponses
from modelyard.http.together import next_turn
from modelyard.telemetry.request_capture import CaptureSink, RequestCapture


class Inference:
    """An ASGI app for one wire. `stored` is given only to the wire that has stored responses."""

    def __init__(
        self,
        wire: WireProtocol,
        gateway: Gateway,
        settings: HttpSettings,
        scribe: CaptureSink | None = None,
        stored: StoredResponses | None = None,
    ) -> None:
        self.wire, self.gateway, self.settings = wire, gateway, settings
        self.scribe, self.stored = scribe, stored

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        visit = RequestContext.of(scope)
        entry = self.scribe.entry(visit.trace) if self.scribe is not None else None
        return Exchange(self, scope, receive, send, visit, entry).run()


class Exchange(Struct):
    """One request and its reply: read, prepared, started, then streamed or sent whole, or refused."""

    _home: Inference
    _scope: Scope
    _receive: Receive
    _send: Send
    _visit: RequestContext
    _entry: RequestCapture | None
    _request: Request | None = None

    async def run(self) -> None:
        gateway, visit = self._home.gateway, self._visit
        gateway.metrics.began()
        try:
            self._request = request = self._at_hand() or await self._read()
            await next_turn(self._scope)
            job = await gateway.prepare(request, visit.caller)
            await next_turn(self._scope)
            answer = gateway.start(job, self._entry)
            await (self._stream(answer, request) if request.stream else self._whole(answer, request))
        except Exception as error:
            if visit.status:
                raise
            await self._refuse(ours(error))
        finally:
            gateway.metrics.ended()
            if self._entry is not None:
                self._entry.close()

    def _at_hand(self) -> Request | None:
        """The request, where all of it is there, and soon read; None, with nothing done: it has to be waited for."""
        if self._home.stored is not None:
            return None
        body = body_at_hand(self._receive, self._visit, self._home.settings)
        return None if body is None else self._home.wire.read_request(self._noted(body), self._visit.headers)

    async def _read(self) -> Request:
        stored, visit, read = self._home.stored, self._visit, self._home.wire.read_request
        body = self._noted(await read_body(self._receive, visit, self._home.settings))
        request = await aside(len(body), read, body, visit.headers)
        return request if stored is None else await stored.recall(request, visit.key)

    def _noted(self, body: bytes) -> bytes:
        if self._entry is not None:
            self._entry.request(body)
        return body

    async def _stream(self, answer: ChoiceStream | MultiChoiceStream | SharedReader, request: Request) -> None:
        home, visit = self._home, self._visit
        writer = home.wire.writer(request, visit.trace)
        remember = home.stored.recorder(request, visit.key) if home.stored is not None else None
        stream = EventStream(answer, writer, self._refusal, visit, home.settings, self._entry, remember)
        await stream.run(self._scope, self._receive, self._send)

    async def _whole(self, answer: ChoiceStream | MultiChoiceStream | SharedReader, request: Request) -> None:
        unwatch = watch(self._scope, self._receive, answer)
        try:
            await next_turn(self._scope)
            replies = await self._replies(answer)
        finally:
            unwatch()
            answer.close()
        self._visit.reuse = answer.reuse
        await next_turn(self._scope)
        if self._home.stored is not None:
            await self._home.stored.remember(request, replies, self._visit.key)
        body = self._home.wire.write_reply(replies, request)
        if self._entry is not None:
            self._entry.response(body)
        await respond(self._send, self._visit, 200, body)

    async def _replies(self, answer: ChoiceStream | MultiChoiceStream | SharedReader) -> list[Reply]:
        """One a choice."""
        choices = answer.job.choices
        folds: list[ReplyBuilder] = []
        async for choice, events in answer:
            folds = folds or [ReplyBuilder() for _ in range(choices)]
            folds[choice].feed(events)
            if choices == 1 and folds[choice].finished:
                break  # to be told that there is no more costs as much as to look
        return [fold.reply() for fold in folds or [ReplyBuilder()]]

    def _refusal(self, error: ModelyardError) -> WireError:
        request = self._request
        streaming = request is not None and request.stream
        return self._home.wire.write_error(error, trace=self._visit.trace, streaming=streaming, request=request)

    async def _refuse(self, error: ModelyardError) -> None:
        self._visit.failed(error)
        if isinstance(error, Cancelled):
            self._visit.status = 499  # the client is gone: counted, not answered
            return
        answer = self._refusal(error)
        if self._entry is not None:
            self._entry.response(answer.body)
        await respond_error(self._send, self._visit, answer)
