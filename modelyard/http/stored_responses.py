"""Stored responses: what `previous_response_id` continues from, scoped to the API key that made them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard.core.errors import NotFound
from modelyard.core.events import Event, Failed, Reply, ReplyBuilder
from modelyard.core.request import Request
from modelyard.core.store import Store
from modelyard.http.request_context import RequestContext
from modelyard.protocols import openai_responses
from modelyard.protocols.openai_responses import stored as memory


class StoredResponses:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def recall(self, request: Request, key: str) -> Request:
        """The request with the conversation it continues in front of it."""
        if request.previous is None:
            return request
        return memory.prepend_stored(await self.get(request.previous, key), request)

    async def remember(self, request: Request, replies: Sequence[Reply], key: str) -> None:
        if request.store is not False:
            reply = replies[0]
            await self._store.put(_scope(key), f"resp_{reply.started.id}", memory.encode_stored(request, reply))

    async def get(self, id: str, key: str) -> memory.StoredResponse:
        stored = await self._store.get(_scope(key), id)
        if stored is None:
            raise NotFound(
                f"no response {id!r} is stored; it may have expired, or belong to another key",
                code="response_not_found",
                param="previous_response_id",
            )
        return memory.decode_stored(stored)

    async def delete(self, id: str, key: str) -> None:
        if not await self._store.delete(_scope(key), id):
            raise NotFound(f"no response {id!r} is stored", code="response_not_found")

    def recorder(self, request: Request, key: str) -> Recorder:
        return Recorder(self, request, key)


class Recorder:
    """Folds a stream while it passes and stores it before its last event goes out: a follow-up may come at once."""

    def __init__(self, stored: StoredResponses, request: Request, key: str) -> None:
        self._stored, self._request, self._key = stored, request, key
        self._fold = ReplyBuilder()

    async def __call__(self, _choice: int, events: list[Event]) -> None:
        if events and isinstance(events[-1], Failed):
            return
        self._fold.feed(events)
        if self._fold.finished:
            await self._stored.remember(self._request, [self._fold.reply()], self._key)


def _scope(key: str) -> str:
    return f"responses/{key}"


# Stored responses over HTTP: look one up, list what it was asked, delete it.


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
    return RequestContext.of(request.scope).key


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
