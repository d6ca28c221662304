"""Stored responses, pure: what is kept of a conversation, how it is continued, and how it is shown again."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.events import Reply
from modelyard.core.request import Message, Request, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.openai_responses.outgoing import split_instructions, write_items
from modelyard.protocols.openai_responses.reply import write_reply


class StoredResponse(Struct, frozen=True):
    """`messages` ends with the assistant's answer; `response` is the object that the client was given."""

    messages: tuple[Message, ...]
    response: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StoredResponse)


def encode_stored(request: Request, reply: Reply) -> bytes:
    """`instructions` hold for one response only and are not kept."""
    _, asked = split_instructions(request)
    return _ENCODER.encode(StoredResponse((*asked, _answer(reply)), write_reply([reply], request)))


def _answer(reply: Reply) -> Message:
    """A call that was cut off was never made: the next turn has no result for it."""
    kept = (block.part for block in reply.blocks if block.complete or not isinstance(block.part, ToolCall))
    return Message("assistant", tuple(kept))


def decode_stored(stored: bytes) -> StoredResponse:
    return _DECODER.decode(stored)


def prepend_stored(stored: StoredResponse, request: Request) -> Request:
    """The request with the stored conversation before its own messages; its own instructions stay at the head."""
    own = request.messages
    lead = own[:1] if request.instructions else ()
    return replace(request, messages=(*lead, *stored.messages, *own[len(lead) :]))


def write_input_items(stored: StoredResponse, *, newest_first: bool = True) -> bytes:
    """What the model was given for this response, in one page."""
    items = [{"id": f"item_{index}"} | item for index, item in enumerate(write_items(stored.messages[:-1]))]
    if newest_first:
        items.reverse()
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return encode({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})


def write_deleted(id: str) -> bytes:
    return encode({"id": id, "object": "response", "deleted": True})


def write_input_tokens(n: int) -> bytes:
    return encode({"object": "response.input_tokens", "input_tokens": n})
