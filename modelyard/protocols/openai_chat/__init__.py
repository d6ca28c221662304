"""OpenAI Chat Completions, both roles: `POST /v1/chat/completions`, its stream, and OpenAI's list of models.

data: {"id": …, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"role": …, "content": ""}}]}
data: {…, "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": null}]}
data: {…, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
data: {…, "choices": [], "usage": {…}}          with stream_options.include_usage
data: [DONE]                                    never after an error chunk
"""

from __future__ import annotations

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.openai_errors import read_http_error, write_http_error
from modelyard.protocols.openai_chat.client import ChatStreamReader, read_reply, write_request
from modelyard.protocols.openai_chat.reply import ChatStreamWriter, write_model, write_models, write_reply
from modelyard.protocols.openai_chat.request import read_request

NAME = "openai_chat"
PATHS: tuple[str, ...] = ("/v1/chat/completions", "/chat/completions")

__all__ = [
    "NAME",
    "PATHS",
    "read_error",
    "read_reply",
    "read_request",
    "reader",
    "write_error",
    "write_model",
    "write_models",
    "write_reply",
    "write_request",
    "writer",
]

read_error = read_http_error


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    return write_http_error(error, trace, request=request)


def writer(request: Request, trace: str) -> ChatStreamWriter:
    return ChatStreamWriter(request, trace)


def reader() -> ChatStreamReader:
    return ChatStreamReader()
