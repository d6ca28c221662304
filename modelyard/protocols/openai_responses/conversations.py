"""Stored conversations: `/v1/conversations`, and how a response continues one.

A conversation is a list of items in the form of the Responses API. Items are checked when they are added, by reading
them as the input of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Message, Request
from modelyard.protocols.common.json import JsonObject, decode, encode
from modelyard.protocols.common.openai_fields import Metadata, check_metadata
from modelyard.protocols.openai_responses import client_tools, mcp
from modelyard.protocols.openai_responses.client import write_items
from modelyard.protocols.openai_responses.request import (
    INCLUDE_ENCRYPTED,
    InputItem,
    join_turns,
    listed_servers,
    read_item,
    read_turns,
)

Items = Annotated[list[limits.JsonObject], limits.Messages]
NewId = Callable[[], str]


class ConversationBody(Struct):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationItemsBody(Struct):
    items: Items


class ConversationUpdateBody(Struct):
    metadata: Metadata | None


_body = msgspec.json.Decoder(ConversationBody)
_items_body = msgspec.json.Decoder(ConversationItemsBody)
_update_body = msgspec.json.Decoder(ConversationUpdateBody)
_item = msgspec.json.Decoder(InputItem)
_PREFIXES = {
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "reasoning": "rs",
    "compaction": "cmp",
    **{f"{kind}_call": client_tools.prefix(kind) for kind in client_tools.TOOLS},
}


def read_conversation(body: bytes, new_id: NewId) -> tuple[Metadata, list[JsonObject]]:
    parsed = decode(_body, body or b"{}")
    return check_metadata(parsed.metadata), complete_items(parsed.items or [], new_id)


def read_new_items(body: bytes, new_id: NewId) -> list[JsonObject]:
    return complete_items(decode(_items_body, body).items, new_id)


def read_update(body: bytes) -> Metadata:
    return check_metadata(decode(_update_body, body).metadata)


def complete_items(items: Iterable[JsonObject], new_id: NewId) -> list[JsonObject]:
    """The items with all fields that the API returns: an id of their own, a type, a status, and content as a list."""
    found: list[JsonObject] = []
    for index, item in enumerate(items):
        path = f"items[{index}]"
        kind = item.get("type") or "message"
        if kind == "item_reference":
            raise Unsupported(f"{path}: send the item itself, not a reference", param=f"{path}.type")
        if not isinstance(kind, str):
            raise InvalidRequest(f"{path}.type must be a string", param=f"{path}.type")
        given = {name: value for name, value in item.items() if name != "id" and value is not None}
        id = f"{_PREFIXES.get(kind, 'msg')}_{new_id()}"
        found.append(_complete_item({"id": id, "type": kind, "status": "completed"} | given, path))
    return found


def _complete_item(item: JsonObject, path: str) -> JsonObject:
    kind, content = item["type"], item.get("content")
    if kind == "message" and isinstance(content, str):
        text_type = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": text_type, "text": content}]
    if kind == "message" and isinstance(content, list):
        item["content"] = [_complete_part(part) for part in content]
    if kind == "reasoning":
        item.setdefault("summary", [])
    read_item(decode(_item, encode(item)), path, [])
    return item


def _complete_part(part: object) -> object:
    if isinstance(part, dict) and part.get("type") == "output_text":
        return {"annotations": [], "logprobs": []} | part
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"detail": "auto"} | part
    return part


def write_input(messages: tuple[Message, ...], new_id: NewId) -> list[JsonObject]:
    """The messages of a request as items of its conversation."""
    return complete_items(write_items(messages), new_id)


def prepend_items(items: Sequence[bytes], request: Request) -> Request:
    """The request with the items of its conversation before its messages; its own instructions stay first."""
    system = request.messages[:1] if request.instructions else ()
    decoded = [_item.decode(item) for item in items]
    earlier = join_turns(read_turns(decoded, "items", []))
    if listed := listed_servers(decoded):
        request = replace(request, tools=mcp.with_listed(request.tools, listed))
    messages = (*system, *earlier, *request.messages[len(system) :])
    return replace(request, messages=messages, earlier=len(system) + len(earlier))


def write_conversation(id: str, created: int, metadata: Metadata) -> bytes:
    return encode({"id": id, "object": "conversation", "created_at": created, "metadata": metadata})


def write_deleted_conversation(id: str) -> bytes:
    return encode({"id": id, "object": "conversation.deleted", "deleted": True})


def shown_item(item: bytes, include: Iterable[str]) -> Raw:
    """As the client asked for it: encrypted reasoning only on request."""
    if INCLUDE_ENCRYPTED in include or b'"encrypted_content"' not in item:
        return Raw(item)
    fields = msgspec.json.decode(item, type=dict[str, Raw])
    if bytes(fields["type"]) == b'"reasoning"':
        fields.pop("encrypted_content", None)
    return Raw(encode(fields))
