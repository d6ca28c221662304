"""Stored responses: what is kept of a conversation, how the next request continues it, and how it is listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Reply
from modelyard.core.request import (
    Compaction,
    ItemReference,
    Message,
    Part,
    Request,
    Tool,
    ToolCall,
    ToolResult,
    summary_message,
)
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.openai_fields import PageQuery, field_of, write_page
from modelyard.protocols.openai_responses import mcp
from modelyard.protocols.openai_responses.client import write_items
from modelyard.protocols.openai_responses.client_tools import typed
from modelyard.protocols.openai_responses.conversations import shown_item
from modelyard.protocols.openai_responses.reply import split_instructions, write_reply
from modelyard.protocols.openai_responses.request import InputItem, read_item


class StoredResponse(Struct, frozen=True):
    """`messages` ends with the assistant's answer; `response` is the object that the client received. After a warm-up
    the answer is empty, and not a part of the conversation."""

    messages: tuple[Message, ...]
    response: bytes
    warm_up: bool = False
    listed: tuple[str, ...] = ()  # MCP servers whose tools are listed up to here
    answered: int = 1  # messages of the answer: with calls of servers' tools, their results, and what followed
    tools: tuple[Tool, ...] = ()  # of a thread of Messages, which has those of its first request


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredResponse)


def make_stored(request: Request, response: bytes, reply: Reply | None = None) -> StoredResponse:
    """`instructions` apply to one response only and are not kept. Neither is an incomplete call: it has no result."""
    messages = request.messages if request.thread else split_instructions(request)[1]
    blocks = () if request.warm_up or reply is None else reply.blocks
    kept = [block.part for block in blocks if block.complete or not isinstance(block.part, ToolCall)]
    parts = [typed(part, request.tools) if isinstance(part, ToolCall) else part for part in kept]
    listed = mcp.listed_servers(request.tools, reply)
    if parts and isinstance(first := parts[0], Compaction):  # it stands for the conversation before it
        messages = (*(m for m in messages[:1] if m.role == "system"), summary_message(first.text))
        del parts[0]
    if not any(isinstance(part, ToolResult) for part in parts):
        return StoredResponse((*messages, Message("assistant", tuple(parts))), response, request.warm_up, listed)
    messages, answer = mcp.with_answer(messages, parts)
    return StoredResponse((*messages, *answer), response, request.warm_up, listed, len(answer))


def encode_stored(request: Request, reply: Reply) -> bytes:
    return _encoder.encode(make_stored(request, write_reply([reply], request), reply))


def encode_thread(request: Request, reply: Reply) -> bytes:
    """Without what gives access to MCP servers: the client sends it with each request."""
    tools = tuple(t if t.server is None else replace(t, server=replace(t.server, headers={})) for t in request.tools)
    return _encoder.encode(replace(make_stored(request, b"", reply), tools=tools))


def _thread_tools(stored: StoredResponse, request: Request) -> tuple[Tool, ...]:
    access = {tool.server.label: tool.server.headers for tool in request.tools if tool.server is not None}
    own = [tool for tool in stored.tools if tool.server is None or tool.server.label in access]
    return tuple(t if (s := t.server) is None else replace(t, server=replace(s, headers=access[s.label])) for t in own)


def decode_stored(stored: bytes) -> StoredResponse:
    return _decoder.decode(stored)


def prepend_stored(stored: StoredResponse, request: Request) -> Request:
    """The request with the stored conversation before its messages; its own instructions stay first."""
    if request.thread:
        messages = (*stored.messages, *request.messages)
        return replace(request, messages=messages, tools=_thread_tools(stored, request))
    system = request.messages[:1] if request.instructions else ()
    earlier = stored.messages[:-1] if stored.warm_up else stored.messages
    tools = mcp.with_listed(request.tools, stored.listed) if stored.listed else request.tools
    messages = (*system, *earlier, *request.messages[len(system) :])
    _check_results(request.messages, messages)
    return replace(request, messages=messages, tools=tools)


def _check_results(added: tuple[Message, ...], conversation: tuple[Message, ...]) -> None:
    """A result without its call belongs to another response. A whole conversation as input may have some: clients
    shorten it."""
    results = [part.call_id for message in added for part in message.parts if isinstance(part, ToolResult)]
    if not results:
        return
    calls = {part.id for message in conversation for part in message.parts if isinstance(part, ToolCall)}
    if (lost := next((id for id in results if id not in calls), None)) is not None:
        raise InvalidRequest(
            f"input: an output answers the call {lost[:100]!r}, which is not in the conversation that it continues",
            code="tool_call_not_found",
            param="input",
        )


# --- references to items ----------------------------------------------------------------------------------------------

_output = msgspec.json.Decoder(list[InputItem])


def referenced_items(messages: Iterable[Message]) -> list[ItemReference]:
    return [part for message in messages for part in message.parts if isinstance(part, ItemReference)]


def read_output_item(stored: StoredResponse, id: str) -> tuple[Part, ...] | None:
    """The item as an input has it. None: the response has no such item."""
    items = _output.decode(field_of(stored.response, "output") or b"[]")
    found = next((item for item in items if item.id == id), None)
    turn = None if found is None else read_item(found, "input", [])
    return None if turn is None else tuple(part for part in turn[1] if not isinstance(part, ItemReference))


def replace_references(request: Request, items: Mapping[str, tuple[Part, ...]]) -> Request:
    """The request with the parts of the items that it refers to."""

    def replaced(message: Message) -> Message:
        parts: list[Part] = []
        for part in message.parts:
            parts += items[part.id] if isinstance(part, ItemReference) else (part,)
        return replace(message, parts=tuple(parts))

    return replace(request, messages=tuple(map(replaced, request.messages)), has_references=False)


# --- lists ------------------------------------------------------------------------------------------------------------

_ALL = PageQuery("", 1 << 30, newest_first=True)


def write_input_items(stored: StoredResponse, query: PageQuery = _ALL, include: Iterable[str] = ()) -> bytes:
    """A page of the input of a stored response."""
    items = [
        {"id": f"item_{index}", "status": "completed"} | _with_annotations(item)
        for index, item in enumerate(write_items(stored.messages[: -stored.answered]))
    ]
    if query.newest_first:
        items.reverse()
    start = 0
    if query.after:
        start = next((at for at, item in enumerate(items, 1) if item["id"] == query.after), -1)
        if start < 0:
            raise InvalidRequest(f"after: the response has no item {query.after[:100]!r}", param="after")
    page, wanted = items[start : start + query.limit], tuple(include)
    shown = [shown_item(encode(item), wanted) for item in page]
    return write_page(shown, [item["id"] for item in page], start + query.limit < len(items))


def _with_annotations(item: JsonObject) -> JsonObject:
    if item["type"] != "message" or item["role"] != "assistant":
        return item
    return item | {"content": [{"annotations": [], "logprobs": []} | part for part in item["content"]]}


def write_deleted(id: str) -> bytes:
    return encode({"id": id, "object": "response", "deleted": True})


def write_input_tokens(tokens: int) -> bytes:
    return encode({"object": "response.input_tokens", "input_tokens": tokens})
