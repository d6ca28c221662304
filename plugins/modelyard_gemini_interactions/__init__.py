"""Gemini's Interactions: created, continued, fetched, cancelled and deleted, on the stored responses of the gateway.

POST   /v1beta/interactions               whole, streamed, or in the background
GET    /v1beta/interactions/{id}          also while it runs
POST   /v1beta/interactions/{id}/cancel   one in the background
DELETE /v1beta/interactions/{id}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.core.events import Usage
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request, ToolCall
from modelyard.gateway.background_responses import not_in_background
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import Row
from modelyard.http.server import HttpContext
from modelyard.protocols.common.json import encode
from modelyard.protocols.openai_responses.stored import StoredResponse
from modelyard_gemini_interactions import protocol


def endpoints(context: HttpContext) -> Iterator[tuple[Row, ASGIApp]]:
    gateway = context.gateway
    if gateway.stored is None:
        return
    known = cast(StoredResponses, StoredInteractions(gateway.stored))
    create = InferenceEndpoint(cast(WireProtocol, protocol), gateway, context.settings, context.captures, known)
    stored, (path, *also) = InteractionEndpoints(gateway.stored), protocol.PATHS
    one = tuple(f"{name}/{{id}}" for name in (path, *also))
    cancel = tuple(f"{name}/cancel" for name in one)
    yield Row("POST", path, protocol.NAME, also=tuple(also), protocol="gemini"), Created(create)
    for method, paths, handler in (
        ("GET", one, stored.get),
        ("DELETE", one, stored.delete),
        ("POST", cancel, stored.cancel),
    ):
        yield Row(method, paths[0], protocol.NAME, also=paths[1:], protocol="gemini"), request_response(handler)


class StoredInteractions:
    """The stored responses, with the words of this protocol for one that is not there."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    async def resume(self, request: Request, key: str) -> Request:
        try:
            return await self._stored.resume(request, key)
        except InvalidRequest as error:
            if error.code != "previous_response_not_found":
                raise
            raise _not_found(request.previous or "") from error


class Created:
    """The endpoint that creates interactions. One in the background is answered with its stored response, which becomes
    an interaction here."""

    notes_status = True

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {}

        async def written(message: Message) -> None:
            nonlocal start
            body = message.get("body", b"")
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start:
                if start["status"] == 200 and body.startswith(b"{") and b'"object":"response"' in body[:200]:
                    body = encode(_interaction(StoredResponse((), body)))
                    message = {**message, "body": body}
                headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
                start = {}
            await send(message)

        await self._app(scope, receive, written)


def _is_json(message: Message) -> bool:
    headers: dict[bytes, bytes] = dict(message["headers"])
    return headers.get(b"content-type", b"").startswith(b"application/json")


class InteractionEndpoints:
    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def get(self, request: HttpRequest) -> Response:
        if request.query_params.get("stream", "").lower() == "true":
            raise Unsupported("stream: a stored interaction is read whole", param="stream")
        id, key = request.path_params["id"], RequestContext.of(request.scope).key
        try:
            return _json(_interaction(await self._stored.get(id, key)))
        except NotFound:
            raise _not_found(id) from None

    async def cancel(self, request: HttpRequest) -> Response:
        id, key = request.path_params["id"], RequestContext.of(request.scope).key
        background = self._stored.background
        try:
            await self._stored.get(id, key)
        except NotFound:
            raise _not_found(id) from None
        if background is None or await background.find(id, key) is None:
            raise not_in_background(id, "cancelled")
        return _json(_interaction((await background.cancel(id, key)).stored))

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        try:
            await self._stored.delete(id, RequestContext.of(request.scope).key)
        except NotFound:
            raise _not_found(id) from None
        return _json({})


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _not_found(id: str) -> NotFound:
    problem = f"no interaction {id[:100]!r} is stored; it may have expired, or belong to another key"
    return NotFound(problem, code="interaction_not_found")


def _interaction(stored: StoredResponse) -> dict[str, Any]:
    """From the response object, which has its state, and the messages of its answer."""
    response: dict[str, Any] = msgspec.json.decode(stored.response)
    answer = stored.messages[-stored.answered :] if stored.messages else ()
    parts = [part for message in answer for part in message.parts]
    state = response["status"]
    if state == "completed" and parts and isinstance(parts[-1], ToolCall):
        state = "requires_action"
    made = protocol.write_interaction(response["id"], response["model"], response["created_at"], state)
    if response.get("previous_response_id"):
        made["previous_interaction_id"] = response["previous_response_id"]
    if found := response.get("usage"):
        cached = found["input_tokens_details"]["cached_tokens"]
        thoughts = found["output_tokens_details"]["reasoning_tokens"]
        made["usage"] = protocol.write_usage(Usage(found["input_tokens"], cached, found["output_tokens"], thoughts))
    return made | {"steps": list(map(protocol.write_step, parts))}
