"""Stored responses: what `previous_response_id`, `conversation` and a `thread` of Messages continue from, scoped by API
key."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from modelyard.core.errors import Conflict, InvalidRequest, NotFound, Unsupported
from modelyard.core.events import Event, Failed, Finished, Reply, ReplyBuilder
from modelyard.core.request import Part, Request
from modelyard.core.store import Store
from modelyard.gateway.background_responses import BackgroundResponses
from modelyard.gateway.conversations import Conversations
from modelyard.protocols.openai_responses.request import response_of
from modelyard.protocols.openai_responses.stored import (
    StoredResponse,
    decode_stored,
    encode_stored,
    encode_thread,
    prepend_stored,
    read_output_item,
    referenced_items,
    replace_references,
)
from modelyard.telemetry.log import log_event

log = logging.getLogger("modelyard.gateway")

_KEPT_BY_CONNECTION = 8  # responses, whole conversations each
_SAVE_S = 5.0  # a client does not wait longer for its last event


class StoredResponses:
    """`conversations` and `background` are kept elsewhere; None: there are none."""

    def __init__(
        self,
        store: Store,
        conversations: Conversations | None = None,
        background: BackgroundResponses | None = None,
    ) -> None:
        self._store, self.conversations, self.background = store, conversations, background

    async def resume(self, request: Request, key: str) -> Request:
        """The request with the conversation it continues in front, and the items that it refers to."""
        if request.conversation is not None:
            if self.conversations is None:
                raise Unsupported("conversation: conversations are not stored here", param="conversation")
            return await self._with_items(await self.conversations.resume(request, key), key)
        if request.has_references:
            request = await self._with_items(request, key)
        if request.previous is None:
            return request
        if request.thread:
            return prepend_stored(await self._thread(request.previous, key), request)
        try:
            stored = await self.get(request.previous, key, finished=True)
        except NotFound as error:
            raise InvalidRequest(
                f"{error.message}: send the whole conversation as input, without previous_response_id",
                code="previous_response_not_found",
                param="previous_response_id",
            ) from error
        return prepend_stored(stored, request)

    async def _thread(self, id: str, key: str) -> StoredResponse:
        if (found := await self._store.get(_threads(key), id)) is None:
            problem = f"no thread has the message {id[:100]!r}; it may have expired, or belong to another key"
            raise NotFound(f"{problem}: send the whole conversation as a new one", code="thread_not_found")
        return decode_stored(found)

    async def _with_items(self, request: Request, key: str) -> Request:
        responses: dict[str, StoredResponse] = {}
        items: dict[str, tuple[Part, ...]] = {}
        for reference in referenced_items(request.messages):
            id = reference.id
            response = response_of(id)
            try:
                if response is not None and response not in responses:
                    responses[response] = await self.get(response, key)
            except NotFound:
                response = None
            parts = None if response is None else read_output_item(responses[response], id)
            if parts is None and not reference.optional:
                raise InvalidRequest(
                    f"input: no stored response has the item {id[:100]!r}: send the item itself, or store the response"
                    " that it is from",
                    code="item_not_found",
                    param="input",
                )
            items[id] = parts or ()
        return replace_references(request, items)

    async def save(self, request: Request, reply: Reply, key: str) -> Finished:
        """Best effort: the reply is there and is sent in any case. Its end, which says if it could not be stored."""
        if request.store is False and request.conversation is None:
            return reply.finished
        id = ("msg_" if request.thread else "resp_") + reply.started.id
        try:
            async with asyncio.timeout(_SAVE_S):
                await self._save(id, request, reply, key)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            log_event(log, logging.ERROR, "a response was not stored", response=id, why=why)
            return replace(reply.finished, storing_failed=True)
        return reply.finished

    async def _save(self, id: str, request: Request, reply: Reply, key: str) -> None:
        if request.thread:
            await self._store.put(_threads(key), id, encode_thread(request, reply))
            return
        encoded = encode_stored(request, reply)
        if request.conversation is not None and self.conversations is not None:
            await self.conversations.append(request, decode_stored(encoded).response, key)
        if request.store is not False:
            await self._store.put(_scope(key), id, encoded)

    async def get(self, id: str, key: str, *, finished: bool = False) -> StoredResponse:
        """`finished`: raise if it still runs."""
        found = await self._store.get(_scope(key), id)
        if found is not None:
            return decode_stored(found)
        record = await self.background.find(id, key) if self.background is not None else None
        if record is None:
            raise NotFound(
                f"no response {id!r} is stored; it may have expired, or belong to another key",
                code="response_not_found",
            )
        if finished and record.status in ("queued", "in_progress"):
            raise Conflict(f"the response {id!r} still runs: continue it when it has ended")
        return record.stored

    async def delete(self, id: str, key: str) -> None:
        is_deleted = await self._store.delete(_scope(key), id)
        if self.background is not None and await self.background.delete(id, key):
            is_deleted = True
        if not is_deleted:
            raise NotFound(f"no response {id!r} is stored", code="response_not_found")

    def recorder(self, request: Request, key: str) -> ResponseRecorder:
        return ResponseRecorder(self, request, key)

    def threads(self) -> StoredThreads:
        return StoredThreads(self._store)

    def of_connection(self) -> ConnectionResponses:
        return ConnectionResponses(self._store, self.conversations, self.background)


class StoredThreads(StoredResponses):
    """For Messages, whose conversations are kept only where a client asks for it."""

    async def save(self, request: Request, reply: Reply, key: str) -> Finished:
        return await super().save(request, reply, key) if request.thread else reply.finished


class ConnectionResponses(StoredResponses):
    """The responses that a WebSocket connection can continue: the stored ones, and its own newest ones even if they are
    not stored."""

    def __init__(
        self,
        store: Store,
        conversations: Conversations | None = None,
        background: BackgroundResponses | None = None,
    ) -> None:
        super().__init__(store, conversations, background)
        self._newest: dict[str, bytes] = {}

    async def save(self, request: Request, reply: Reply, key: str) -> Finished:
        self._newest[f"resp_{reply.started.id}"] = encode_stored(request, reply)
        while len(self._newest) > _KEPT_BY_CONNECTION:
            del self._newest[next(iter(self._newest))]
        return await super().save(request, reply, key)

    def forget(self, id: object) -> None:
        """A request that continued this response failed: only a stored one can be continued again."""
        if isinstance(id, str):
            self._newest.pop(id, None)

    async def get(self, id: str, key: str, *, finished: bool = False) -> StoredResponse:
        if (found := self._newest.get(id)) is not None:
            return decode_stored(found)
        return await super().get(id, key, finished=finished)


class ResponseRecorder:
    """Collects a stream and saves it before its last event is sent, because a follow-up may arrive at once."""

    def __init__(self, stored: StoredResponses, request: Request, key: str) -> None:
        self._stored, self._request, self._key = stored, request, key
        self._reply = ReplyBuilder()

    async def __call__(self, events: list[Event]) -> list[Event]:
        """The events to send."""
        if events and isinstance(events[-1], Failed):
            return events
        self._reply.feed(events)
        if not self._reply.finished:
            return events
        return [*events[:-1], await self._stored.save(self._request, self._reply.reply(), self._key)]


def _threads(key: str) -> str:
    return f"threads/{key}"


def _scope(key: str) -> str:
    return f"responses/{key}"
