"""Stored responses over HTTP: look one up, list what it was asked, delete it."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard.http.stored import StoredResponses
from modelyard.http.visit import Visit
from modelyard.protocols import openai_responses
from modelyard.protocols.openai_responses import memory


class Responses:
    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def get(self, request: HttpRequest) -> Response:
        stored = await self._stored.get(request.path_params["id"], _key(request))
        return _json(stored.response)

    async def input_items(self, request: HttpRequest) -> Response:
        stored = await self._stored.get(request.path_params["id"], _key(request))
        return _json(memory.write_input_items(stored))

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        await self._stored.delete(id, _key(request))
        return _json(openai_responses.write_deleted(id))


def _key(request: HttpRequest) -> str:
    return Visit.of(request.scope).key


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
