"""One path, two dialects: who reads a body, and in which of the two its answer is written.

The pool's keys stand in OpenAI's body as fields that are only looked at, so that telling the two apart costs nothing: a
body in the pool's dialect is read a second time, any other is not even looked through again.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Reply
from modelyard.core.protocol import EventWriter, WireError
from modelyard.core.request import Request
from modelyard.protocols import pool_responses
from modelyard.protocols.common.json import decode
from modelyard.protocols.openai_responses import errors, reply, request
from modelyard.protocols.openai_responses.body import BODY, ResponsesBody
from modelyard.protocols.openai_responses.writer import ResponsesWriter
from modelyard.protocols.pool_responses.body import ITEM_TYPES


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """`headers` has lower-case names."""
    asked = decode(BODY, body)
    if is_pool(asked):
        return pool_responses.read_request(body, headers)
    return request.read_asked(asked, headers)


def is_pool(asked: ResponsesBody) -> bool:
    """By a key that OpenAI's Responses do not have. A `thinking` that is an object is Anthropic's, sent by mistake."""
    if asked.decoding is not UNSET or asked.messages is not UNSET:
        return True
    if asked.source_lang_code is not UNSET or asked.target_lang_code is not UNSET:
        return True
    if asked.thinking is not UNSET and bytes(asked.thinking).startswith(b'"'):
        return True
    items = asked.input
    return isinstance(items, list) and not ITEM_TYPES.isdisjoint([item.type for item in items])


def write_reply(replies: list[Reply], request: Request) -> bytes:
    if request.dialect == pool_responses.DIALECT:
        return pool_responses.write_reply(replies, request)
    return reply.write_reply(replies, request)


def write_error(
    error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
) -> WireError:
    if request is not None and request.dialect == pool_responses.DIALECT:
        return pool_responses.write_error(error, trace=trace, streaming=streaming, request=request)
    return errors.write_error(error, trace=trace, streaming=streaming, request=request)


def writer(request: Request, trace: str) -> EventWriter:
    if request.dialect == pool_responses.DIALECT:
        return pool_responses.writer(request, trace)
    return ResponsesWriter(request, trace)
