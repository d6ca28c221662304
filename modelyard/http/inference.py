"""The hot endpoints: one handler for every protocol, because a protocol is a value here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import Fold
from modelyard.core.request import Request
from modelyard.core.wire import Wire, WireError
from modelyard.gateway import Answer, Gateway
from modelyard.gateway.choices import Choices
from modelyard.http.errors import ours
from modelyard.http.settings import HttpSettings
from modelyard.http.sse import EventStream, watch
from modelyard.http.stored import StoredResponses
from modelyard.http.visit import Visit, aside, read_body, respond, respond_error
from modelyard.telemetry.journal import Entry, Journal


class Inference:
    """An ASGI app for one wire. `stored` is given only to the wire that has stored responses."""

    def __init__(
        self,
        wire: Wire,
        gateway: Gateway,
        settings: HttpSettings,
        journal: Journal | None = None,
        stored: StoredResponses | None = None,
    ) -> None:
        self._wire, self._gateway, self._settings = wire, gateway, settings
        self._journal, self._stored = journal, stored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._gateway.metrics
        metrics.began()
        try:
            await self._answer(scope, receive, send)
        finally:
            metrics.ended()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = Visit.of(scope)
        entry = self._journal.entry(visit.trace) if self._journal is not None else None
        request: Request | None = None
        try:
            body = await read_body(receive, visit, self._settings)
            if entry is not None:
                entry.request(body)
            request = await self._read(body, visit)
            job = await self._gateway.prepare(request, visit.caller)
            answer = self._gateway.start(job, entry)
            if request.stream:
                await self._stream(answer, request, visit, entry, receive, send)
            else:
                await self._whole(answer, request, visit, entry, receive, send)
        except Exception as error:
            if visit.status:
                raise
            await self._refuse(ours(error), request, visit, entry, send)
        finally:
            if entry is not None:
                entry.close()

    async def _read(self, body: bytes, visit: Visit) -> Request:
        request = await aside(len(body), self._wire.read_request, body, visit.headers)
        return request if self._stored is None else await self._stored.recall(request, visit.key)

    async def _stream(
        self,
        answer: Answer | Choices,
        request: Request,
        visit: Visit,
        entry: Entry | None,
        receive: Receive,
        send: Send,
    ) -> None:
        writer = self._wire.writer(request, visit.trace)
        remember = self._stored.recorder(request, visit.key) if self._stored is not None else None
        refusal = self._refusal(request, visit)
        await EventStream(answer, writer, refusal, visit, self._settings, entry, remember).run(receive, send)

    async def _whole(
        self,
        answer: Answer | Choices,
        request: Request,
        visit: Visit,
        entry: Entry | None,
        receive: Receive,
        send: Send,
    ) -> None:
        folds = [Fold() for _ in range(answer.job.choices)]
        watcher = asyncio.get_running_loop().create_task(watch(receive, answer))
        try:
            async for choice, events in answer:
                folds[choice].feed(events)
        finally:
            watcher.cancel()
            answer.close()
        replies = [fold.reply() for fold in folds]
        if self._stored is not None:
            await self._stored.remember(request, replies, visit.key)
        body = self._wire.write_reply(replies, request)
        if entry is not None:
            entry.response(body)
        await respond(send, visit, 200, body)

    def _refusal(self, request: Request | None, visit: Visit) -> Callable[[ModelyardError], WireError]:
        streaming = request is not None and request.stream
        return lambda error: self._wire.write_error(error, trace=visit.trace, streaming=streaming, request=request)

    async def _refuse(
        self, error: ModelyardError, request: Request | None, visit: Visit, entry: Entry | None, send: Send
    ) -> None:
        visit.failed(error)
        if isinstance(error, Cancelled):
            visit.status = 499  # the client is gone: counted, not answered
            return
        answer = self._refusal(request, visit)(error)
        if entry is not None:
            entry.response(answer.body)
        await respond_error(send, visit, answer)
