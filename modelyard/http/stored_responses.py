"""Stored responses over HTTP: get one, read its events again, cancel it, list its input items, delete it."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from modelyard.core.errors import InvalidRequest
from modelyard.gateway.background_responses import not_in_background
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.http.inference import send_stored_events
from modelyard.http.request_context import RequestContext
from modelyard.http.settings import HttpSettings
from modelyard.protocols.common.openai_lists import read_page_query
from modelyard.protocols.openai_responses.stored import write_deleted, write_input_items

_INCLUDE = ("include", "include[]")  # the SDKs send the second


def included(request: HttpRequest) -> list[str]:
    return [value for name in _INCLUDE for value in request.query_params.getlist(name)]


class StoredResponseEndpoints:
    def __init__(self, stored: StoredResponses, settings: HttpSettings) -> None:
        self._stored, self._settings = stored, settings

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

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
