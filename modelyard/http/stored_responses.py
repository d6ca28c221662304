"""Stored responses over HTTP: get one, list its input items, delete it."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard.gateway.stored_responses import StoredResponses
from modelyard.http.request_context import RequestContext
from modelyard.protocols.openai_responses.stored import write_deleted, write_input_items


class StoredResponseEndpoints:
    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def get(self, request: HttpRequest) -> Response:
        stored = await self._stored.get(request.path_params["id"], RequestContext.of(request.scope).key)
        return Response(stored.response, media_type="application/json")

    async def input_items(self, request: HttpRequest) -> Response:
        stored = await self._stored.get(request.path_params["id"], RequestContext.of(request.scope).key)
        return Response(write_input_items(stored), media_type="application/json")

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        await self._stored.delete(id, RequestContext.of(request.scope).key)
        return Response(write_deleted(id), media_type="application/json")
