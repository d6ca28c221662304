"""`/v1/conversations`: create, get, change and delete them and their items."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from modelyard.gateway.conversations import Conversations, StoredConversation, new_item_id
from modelyard.http.request_context import RequestContext, read_body, run_sized
from modelyard.http.settings import HttpSettings
from modelyard.http.stored_responses import included
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_lists import read_page_query, write_page
from modelyard.protocols.openai_responses.conversations import (
    read_conversation,
    read_new_items,
    read_update,
    shown_item,
    write_conversation,
    write_deleted_conversation,
)


class ConversationEndpoints:
    def __init__(self, conversations: Conversations, settings: HttpSettings) -> None:
        self._conversations, self._settings = conversations, settings

    def routes(self) -> list[BaseRoute]:
        one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(items, self.items, methods=["GET"]),
            Route(items, self.add, methods=["POST"]),
            Route(items + "/{item}", self.item, methods=["GET"]),
            Route(items + "/{item}", self.delete_item, methods=["DELETE"]),
        ]

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
