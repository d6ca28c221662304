"""Stored responses: what `previous_response_id` continues from, scoped by API key."""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.core.errors import NotFound
from modelyard.core.events import Event, Failed, Reply, ReplyBuilder
from modelyard.core.request import Request
from modelyard.core.store import Store
from modelyard.protocols.openai_responses.stored import StoredResponse, decode_stored, encode_stored, prepend_stored


class StoredResponses:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def resume(self, request: Request, key: str) -> Request:
        """The request with the conversation it continues in front."""
        if request.previous is None:
            return request
        return prepend_stored(await self.get(request.previous, key), request)

    async def save(self, request: Request, replies: Sequence[Reply], key: str) -> None:
        if request.store is not False:
            reply = replies[0]
            await self._store.put(_scope(key), f"resp_{reply.started.id}", encode_stored(request, reply))

    async def get(self, id: str, key: str) -> StoredResponse:
        found = await self._store.get(_scope(key), id)
        if found is None:
            raise NotFound(
                f"no response {id!r} is stored; it may have expired, or belong to another key",
                code="response_not_found",
                param="previous_response_id",
            )
        return decode_stored(found)

    async def delete(self, id: str, key: str) -> None:
        if not await self._store.delete(_scope(key), id):
            raise NotFound(f"no response {id!r} is stored", code="response_not_found")

    def recorder(self, request: Request, key: str) -> ResponseRecorder:
        return ResponseRecorder(self, request, key)


class ResponseRecorder:
    """Collects a stream and saves it before its last event is sent, because a follow-up may arrive at once."""

    def __init__(self, stored: StoredResponses, request: Request, key: str) -> None:
        self._stored, self._request, self._key = stored, request, key
        self._reply = ReplyBuilder()

    async def __call__(self, _choice: int, events: list[Event]) -> None:
        if events and isinstance(events[-1], Failed):
            return
        self._reply.feed(events)
        if self._reply.finished:
            await self._stored.save(self._request, [self._reply.reply()], self._key)


def _scope(key: str) -> str:
    return f"responses/{key}"
