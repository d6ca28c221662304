"""Stored responses and conversations over HTTP, and the WebSocket mode of /v1/responses.

In WebSocket mode each `response.create` of the client is a request of its own, and the events of its stream are
messages. Requests run one after the other, or at once if they name different lanes (`stream_id`). A connection can
continue its newest responses even if they are not stored. After an hour it takes no more, and ends with the last one
that runs; responses in the background go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, ModelyardError, Overloaded, TooLarge
from modelyard.gateway.background_responses import not_in_background
from modelyard.gateway.conversations import Conversations, StoredConversation, new_item_id
from modelyard.gateway.request_work import run_sized
from modelyard.gateway.stored_responses import ConnectionResponses, StoredResponses
from modelyard.http.connection import ClientConnection
from modelyard.http.inference import InferenceEndpoint, send_stored_events
from modelyard.http.request_context import RequestContext, json_fault, read_body
from modelyard.http.settings import HttpSettings
from modelyard.protocols.common.dialects import DIALECT_HEADER
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import write_http_error
from modelyard.protocols.common.openai_fields import field_of, read_page_query, write_page
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.openai_responses.conversations import (
    read_conversation,
    read_new_items,
    read_update,
    shown_item,
    write_conversation,
    write_deleted_conversation,
)
from modelyard.protocols.openai_responses.stored import write_deleted, write_input_items

_INCLUDE = ("include", "include[]")  # the SDKs send the second


def included(request: HttpRequest) -> list[str]:
    return [value for name in _INCLUDE for value in request.query_params.getlist(name)]


class StoredResponseEndpoints:
    def __init__(self, stored: StoredResponses, settings: HttpSettings) -> None:
        self._stored, self._settings = stored, settings

    async def get(self, request: HttpRequest) -> Response:
        id, key = request.path_params["id"], RequestContext.of(request.scope).key
        stored = await self._stored.get(id, key)
        if request.query_params.get("stream", "").lower() == "true":
            return await self._stream(request, id, key)
        return Response(stored.response, media_type="application/json")

    async def _stream(self, request: HttpRequest, id: str, key: str) -> Response:
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 12:
            raise InvalidRequest("starting_after is the number of an event", param="starting_after")
        background = self._stored.background
        if background is None or await background.find(id, key) is None:
            raise not_in_background(id, "streamed again")
        events = background.events(id, key, int(after), self._settings.keepalive_s)

        class EventsResponse(Response):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                await send_stored_events(events, scope, receive, send)

        return EventsResponse()

    async def cancel(self, request: HttpRequest) -> Response:
        id, key = request.path_params["id"], RequestContext.of(request.scope).key
        await self._stored.get(id, key)
        background = self._stored.background
        if background is None or await background.find(id, key) is None:
            raise not_in_background(id, "cancelled")
        record = await background.cancel(id, key)
        return Response(record.stored.response, media_type="application/json")

    async def input_items(self, request: HttpRequest) -> Response:
        stored = await self._stored.get(request.path_params["id"], RequestContext.of(request.scope).key)
        page = write_input_items(stored, read_page_query(request.query_params), included(request))
        return Response(page, media_type="application/json")

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        await self._stored.delete(id, RequestContext.of(request.scope).key)
        return Response(write_deleted(id), media_type="application/json")


class ConversationEndpoints:
    def __init__(self, conversations: Conversations, settings: HttpSettings) -> None:
        self._conversations, self._settings = conversations, settings

    async def create(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        metadata, items = await run_sized(len(body), read_conversation, body, new_item_id)
        return _json(_written(await self._conversations.create(_key(request), metadata, items)))

    async def get(self, request: HttpRequest) -> Response:
        return _json(_written(await self._conversations.get(request.path_params["id"], _key(request))))

    async def update(self, request: HttpRequest) -> Response:
        metadata = read_update(await self._body(request))
        return _json(_written(await self._conversations.update(request.path_params["id"], _key(request), metadata)))

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        await self._conversations.delete(id, _key(request))
        return _json(write_deleted_conversation(id))

    async def items(self, request: HttpRequest) -> Response:
        query, include = read_page_query(request.query_params), included(request)
        found, has_more = await self._conversations.items(request.path_params["id"], _key(request), query)
        return _json(write_page([shown_item(item, include) for _, item in found], [id for id, _ in found], has_more))

    async def add(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        items = await run_sized(len(body), read_new_items, body, new_item_id)
        await self._conversations.add(request.path_params["id"], _key(request), items)
        include = included(request)
        shown = [shown_item(encode(item), include) for item in items]
        return _json(write_page(shown, [item["id"] for item in items], has_more=False))

    async def item(self, request: HttpRequest) -> Response:
        params = request.path_params
        found = await self._conversations.item(params["id"], _key(request), params["item"])
        return _json(bytes(shown_item(found, included(request))))

    async def delete_item(self, request: HttpRequest) -> Response:
        params = request.path_params
        return _json(_written(await self._conversations.delete_item(params["id"], _key(request), params["item"])))

    async def _body(self, request: HttpRequest) -> bytes:
        return await read_body(request.receive, RequestContext.of(request.scope), self._settings)


def _key(request: HttpRequest) -> str:
    return RequestContext.of(request.scope).key


def _written(found: StoredConversation) -> bytes:
    return write_conversation(found.id, found.created, found.metadata)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


# --- WebSocket mode ---------------------------------------------------------------------------------------------------

_MAX_WAITING = 32  # requests of a connection, in all lanes
_MAX_AGE_S = 3600.0  # of a connection, as at OpenAI


class ClientEvent(Struct):
    type: limits.Word = ""
    stream_id: limits.Name | None = None


_events = msgspec.json.Decoder(ClientEvent)
_fields = msgspec.json.Decoder(dict[str, Raw])


# Answers a request as one over HTTP, with this app in place of its route's.
RequestWith = Callable[[Scope, Receive, Send, ASGIApp], Awaitable[None]]


class ResponsesSocket:
    """An ASGI app for WebSockets. A connection has the `endpoint` with responses of its own."""

    def __init__(
        self, request: RequestWith, endpoint: InferenceEndpoint, stored: StoredResponses, settings: HttpSettings
    ) -> None:
        self._request, self._endpoint, self._stored, self._settings = request, endpoint, stored, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        stored = self._stored.of_connection()
        connection = _Connection(self._request, self._endpoint.with_stored(stored), stored, self._settings, scope, send)
        expiry = asyncio.get_running_loop().call_later(_MAX_AGE_S, connection.expire)
        try:
            while (message := await receive())["type"] != "websocket.disconnect":
                await connection.read(message)
        finally:
            expiry.cancel()
            await connection.close()


class _Connection:
    def __init__(
        self,
        request: RequestWith,
        endpoint: ASGIApp,
        stored: ConnectionResponses,
        settings: HttpSettings,
        scope: Scope,
        send: Send,
    ) -> None:
        self._request, self._endpoint, self._stored = request, endpoint, stored
        self._settings, self._scope, self._send = settings, scope, send
        self._client = ClientConnection()
        self._lanes: dict[str | None, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expired: asyncio.Task[None] | None = None

    def expire(self) -> None:
        self._expired = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._send_error(_too_old(), None)
        await self._send({"type": "websocket.close", "code": 1000})

    async def read(self, message: Message) -> None:
        text = message.get("text")
        data: bytes = text.encode() if text is not None else message.get("bytes") or b""
        lane: str | None = None
        try:
            lane = (await run_sized(len(data), self._parse, data)).stream_id
            if self._expired is not None:
                raise _too_old()
            if sum(1 + queue.qsize() for queue in self._lanes.values()) >= _MAX_WAITING:
                raise Overloaded(f"{_MAX_WAITING} responses of this connection are not finished: wait for one of them")
        except ModelyardError as error:
            await self._send_error(error, lane)
            return
        queue = self._lanes.get(lane)
        if queue is None:
            queue = self._lanes[lane] = asyncio.Queue()
            task = asyncio.get_running_loop().create_task(self._run(lane, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        queue.put_nowait(data)

    def _parse(self, data: bytes) -> ClientEvent:
        if len(data) > self._settings.max_body_bytes:
            raise TooLarge(f"the message is larger than {self._settings.max_body_bytes} bytes (http.max_body_bytes)")
        if (fault := json_fault(data, self._settings.max_json_depth)) is not None:
            raise InvalidRequest(fault, code="invalid_json")
        event = decode(_events, data)
        if event.type != "response.create":
            found = f"not {event.type[:40]!r}" if event.type else "and it is missing"
            raise InvalidRequest(f"type must be 'response.create', {found}", param="type", code="unsupported_event")
        return event

    async def _run(self, lane: str | None, queue: asyncio.Queue[bytes]) -> None:
        while True:
            await self._respond(await queue.get(), lane)
            if queue.empty():
                del self._lanes[lane]
                return

    async def _respond(self, data: bytes, lane: str | None) -> None:
        body, previous = await run_sized(len(data), _request_body, data)
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "headers": [*self._scope["headers"], (DIALECT_HEADER.encode(), b"auto")],
            "client": self._scope["client"],
            "server": self._scope["server"],
            "extensions": self._client.extensions,
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        sender = _ReplySender(self._send, lane)
        await self._request(scope, receive, sender, self._endpoint)
        if sender.failed:
            self._stored.forget(previous)

    async def _send_error(self, error: ModelyardError, lane: str | None) -> None:
        sender = _ReplySender(self._send, lane)
        written = write_http_error(error, "", overflow_param="input")
        await sender({"type": "http.response.start", "status": written.status, "headers": []})
        await sender({"type": "http.response.body", "body": written.body})

    async def close(self) -> None:
        """The client is gone: what runs is cancelled, what waits does not start."""
        for queue in self._lanes.values():
            while not queue.empty():
                queue.get_nowait()
        self._client.lose()
        tasks = [*self._tasks, *([self._expired] if self._expired is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _too_old() -> InvalidRequest:
    minutes = _MAX_AGE_S / 60
    return InvalidRequest(
        f"a connection lasts {minutes:g} minutes: open another one to continue",
        code="websocket_connection_limit_reached",
    )


def _request_body(data: bytes) -> tuple[bytes, Any]:
    """The body of the request over HTTP, without the fields of the event, and the id of the response it continues."""
    fields: dict[str, Any] = decode(_fields, data)
    del fields["type"]
    fields.pop("stream_id", None)
    fields["stream"] = True
    return msgspec.json.encode(fields), msgspec.json.decode(fields.get("previous_response_id", b"null"))


class _ReplySender:
    """Sends a reply over HTTP as messages: each event of a stream, or one error. A repeated `response.in_progress` or a
    comment, the keep-alives over HTTP, becomes OpenAI's `keepalive`: ping frames do not reset clients' idle timers."""

    def __init__(self, send: Send, lane: str | None) -> None:
        self._send = send
        self._end = b"}" if lane is None else b',"stream_id":' + msgspec.json.encode(lane) + b"}"
        self._parser = SseParser()
        self._error: dict[str, Any] | None = None
        self._is_running, self._last = False, b"{}"
        self.failed = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self.failed = True
                self._error = {"type": "error", "status": message["status"]}
                if (delay := headers.get(b"retry-after")) is not None:
                    self._error["headers"] = {"retry-after": delay.decode()}
            return
        body = message.get("body", b"")
        if body.startswith(b":"):  # of a response in the background, whose events are numbered for other readers, too
            await self._keep_alive()
        elif self._error is None:
            for event in self._parser.feed(body):
                self.failed |= event.event == "response.failed"
                self._last = event.data
                if event.event == "response.in_progress" and self._is_running:
                    await self._keep_alive()
                else:
                    await self._send_text(event.data)
                self._is_running |= event.event == "response.in_progress"
        elif body:
            error = msgspec.json.decode(body).get("error")
            if isinstance(error, dict) and error.get("code") is None:  # a code is required here
                error["code"] = error.get("type")
            await self._send_text(msgspec.json.encode(self._error | {"error": error}))

    async def _keep_alive(self) -> None:
        number = field_of(self._last, "sequence_number")
        await self._send_text(encode({"type": "keepalive", "sequence_number": number}))

    async def _send_text(self, data: bytes) -> None:
        await self._send({"type": "websocket.send", "text": (data[:-1] + self._end).decode()})
