"""OpenAI Responses, both roles: items in and out, a numbered event stream, stored conversations.

POST /v1/responses has two dialects: OpenAI's, and the pool dialect of `pool_responses`. The functions below read a body
and answer it in its dialect. The keys that only the pool dialect has are fields of OpenAI's body too, so that telling
the two apart costs nothing; only a body in the pool dialect is decoded a second time.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError
from modelyard.core.events import Failed, Reply
from modelyard.core.protocol import EventWriter, WireError
from modelyard.core.request import Request
from modelyard.protocols import pool_responses
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.openai_errors import write_http_error
from modelyard.protocols.openai_responses import reply as openai_reply
from modelyard.protocols.openai_responses.client import ResponsesStreamReader, read_reply, write_request
from modelyard.protocols.openai_responses.errors import read_error
from modelyard.protocols.openai_responses.reply import ResponsesStreamWriter
from modelyard.protocols.openai_responses.request import body_decoder, is_pool_dialect, read_body
from modelyard.protocols.openai_responses.stored import (
    StoredResponse,
    decode_stored,
    encode_stored,
    prepend_stored,
    write_deleted,
    write_input_items,
    write_input_tokens,
)

NAME = "openai_responses"
PATHS: tuple[str, ...] = ("/v1/responses", "/responses")

__all__ = [
    "NAME",
    "PATHS",
    "StoredResponse",
    "decode_stored",
    "encode_stored",
    "prepend_stored",
    "read_error",
    "read_reply",
    "read_request",
    "reader",
    "write_deleted",
    "write_error",
    "write_input_items",
    "write_input_tokens",
    "write_reply",
    "write_request",
    "writer",
]

_UNREAD = Request(model="")  # for an error from before the body was read


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """`headers` has lower-case names."""
    parsed = decode(body_decoder, body)
    if is_pool_dialect(parsed, headers):
        return pool_responses.read_request(body, headers)
    return read_body(parsed, headers)


def write_reply(replies: list[Reply], request: Request) -> bytes:
    if request.dialect == pool_responses.DIALECT:
        return pool_responses.write_reply(replies, request)
    return openai_reply.write_reply(replies, request)


def write_error(
    error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
) -> WireError:
    """On a stream some errors must be `response.failed`: Codex does not act on HTTP 400 for an overflow, and repeats a
    request that ended with 499."""
    if request is not None and request.dialect == pool_responses.DIALECT:
        return pool_responses.write_error(error, trace=trace, streaming=streaming, request=request)
    if streaming and isinstance(error, ContextOverflow | Cancelled):
        body = ResponsesStreamWriter(request or _UNREAD, trace).write(Failed(error))
        return WireError(200, body, {"x-request-id": trace}, "text/event-stream")
    return write_http_error(error, trace, overflow_param="input", request=request)


def writer(request: Request, trace: str) -> EventWriter:
    if request.dialect == pool_responses.DIALECT:
        return pool_responses.writer(request, trace)
    return ResponsesStreamWriter(request, trace)


def reader() -> ResponsesStreamReader:
    return ResponsesStreamReader()
