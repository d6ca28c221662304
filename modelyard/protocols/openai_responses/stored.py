"""Stored responses: what is kept of a conversation, how the next request continues it, and how it is listed."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.events import Reply
from modelyard.core.request import Message, Request, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.openai_responses.client import write_items
from modelyard.protocols.openai_responses.reply import split_instructions, write_reply


class StoredResponse(Struct, frozen=True):
    """`messages` ends with the assistant's answer; `response` is the object that the client received. After a warm-up
    the answer is empty, and not a part of the conversation."""

    messages: tuple[Message, ...]
    response: bytes
    warm_up: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredResponse)


def encode_stored(request: Request, reply: Reply) -> bytes:
    """`instructions` apply to one response only and are not kept. Neither is an incomplete call: it has no result."""
    _, messages = split_instructions(request)
    blocks = () if request.warm_up else reply.blocks
    parts = (block.part for block in blocks if block.complete or not isinstance(block.part, ToolCall))
    answer = Message("assistant", tuple(parts))
    return _encoder.encode(StoredResponse((*messages, answer), write_reply([reply], request), request.warm_up))


def decode_stored(stored: bytes) -> StoredResponse:
    return _decoder.decode(stored)


def prepend_stored(stored: StoredResponse, request: Request) -> Request:
    """The request with the stored conversation before its messages; its own instructions stay first."""
    system = request.messages[:1] if request.instructions else ()
    earlier = stored.messages[:-1] if stored.warm_up else stored.messages
    return replace(request, messages=(*system, *earlier, *request.messages[len(system) :]))


def write_input_items(stored: StoredResponse, *, newest_first: bool = True) -> bytes:
    """The input of a stored response, in one page."""
    items = [{"id": f"item_{index}"} | item for index, item in enumerate(write_items(stored.messages[:-1]))]
    if newest_first:
        items.reverse()
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return encode({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})


def write_deleted(id: str) -> bytes:
    return encode({"id": id, "object": "response", "deleted": True})


def write_input_tokens(tokens: int) -> bytes:
    return encode({"object": "response.input_tokens", "input_tokens": tokens})
