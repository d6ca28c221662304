"""Stored conversations: lists of items that responses continue and grow, scoped by API key."""

from __future__ import annotations

import secrets
import time

import msgspec

from modelyard.core.errors import NotFound, TooLarge
from modelyard.core.request import Request
from modelyard.core.store import ObjectStore
from modelyard.gateway.records import Records, new_id
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.openai_fields import Metadata, PageQuery, field_of
from modelyard.protocols.openai_responses.conversations import complete_items, prepend_items, write_input

_PAGE = 100
_MAX_BYTES = 64 << 20  # of the items that a request continues


class StoredConversation(msgspec.Struct, frozen=True):
    id: str
    created: int
    metadata: Metadata


def new_item_id() -> str:
    return secrets.token_hex(16)


class Conversations:
    """The items of a conversation are parts of its record. A conversation expires when it was not used for long."""

    def __init__(self, store: ObjectStore, ttl_s: float) -> None:
        self._store = store
        self._records = Records(store, "conversations", StoredConversation, "conversation", ttl_s)
        self.get, self.delete = self._records.get, self._records.delete

    async def create(self, key: str, metadata: Metadata, items: list[JsonObject]) -> StoredConversation:
        made = StoredConversation(new_id("conv_"), int(time.time()), metadata)
        await self._records.put(made.id, key, made)
        await self._add(made.id, key, items)
        return made

    async def update(self, id: str, key: str, metadata: Metadata) -> StoredConversation:
        return await self._records.update(id, key, lambda found: msgspec.structs.replace(found, metadata=metadata))

    async def add(self, id: str, key: str, items: list[JsonObject]) -> None:
        await self._records.touch(id, key)
        await self._add(id, key, items)

    async def _add(self, id: str, key: str, items: list[JsonObject]) -> None:
        for item in items:
            await self._store.put(self._records.parts(id, key), item["id"], encode(item))

    async def items(self, id: str, key: str, query: PageQuery) -> tuple[list[tuple[str, bytes]], bool]:
        """A page of items with their ids, and whether there are more."""
        await self.get(id, key)
        found = await self._store.page(
            self._records.parts(id, key), after=query.after, limit=query.limit + 1, newest_first=query.newest_first
        )
        return found[: query.limit], len(found) > query.limit

    async def item(self, id: str, key: str, item: str) -> bytes:
        await self.get(id, key)
        found = await self._store.get(self._records.parts(id, key), item)
        if found is None:
            raise _no_item(id, item)
        return found

    async def delete_item(self, id: str, key: str, item: str) -> StoredConversation:
        found = await self.get(id, key)
        if not await self._store.delete(self._records.parts(id, key), item):
            raise _no_item(id, item)
        return found

    async def resume(self, request: Request, key: str) -> Request:
        """The request with the items of its conversation in front."""
        if request.conversation is None:
            return request
        items, size = list[bytes](), 0
        query = PageQuery("", _PAGE, newest_first=False)
        while True:
            page, has_more = await self.items(request.conversation, key, query)
            items += [value for _, value in page]
            if (size := size + sum(len(value) for _, value in page)) > _MAX_BYTES:
                raise TooLarge(f"the conversation has more than {_MAX_BYTES} bytes: delete items, or start a new one")
            if not has_more:
                return prepend_items(items, request)
            query = PageQuery(page[-1][0], _PAGE, newest_first=False)

    async def append(self, request: Request, response: bytes, key: str) -> None:
        """What a response was asked, and its output."""
        if request.conversation is None:
            return
        output: list[JsonObject] = msgspec.json.decode(field_of(response, "output") or b"[]")
        made = complete_items(output, new_item_id)
        for item, written in zip(made, output, strict=True):
            item["id"] = written["id"]
        await self.add(
            request.conversation, key, [*write_input(request.messages[request.earlier :], new_item_id), *made]
        )


def _no_item(id: str, item: str) -> NotFound:
    return NotFound(f"the conversation {id[:100]!r} has no item {item[:100]!r}", code="item_not_found")
