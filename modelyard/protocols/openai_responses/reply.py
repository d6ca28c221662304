"""A whole reply as one `response` object: the same items that the stream would have closed with."""

from __future__ import annotations

from modelyard.core.events import Block, Reply
from modelyard.core.request import Request, Text
from modelyard.protocols.common.json import encode
from modelyard.protocols.openai_responses.response import ResponseObject, write_item

_NOTHING = (Block(Text("")),)  # a reply without a block is one empty message, here as in the stream


def write_reply(replies: list[Reply], request: Request) -> bytes:
    """This wire has one choice: the first reply."""
    reply = replies[0]
    started, key = reply.started, reply.started.id
    output = [write_item(block, key, index, request) for index, block in enumerate(reply.blocks or _NOTHING)]
    response = ResponseObject(request, key).finished(reply.finished, started.created, started.model, output)
    return encode(response)
