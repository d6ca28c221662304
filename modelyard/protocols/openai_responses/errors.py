"""Errors on the Responses wire: OpenAI's HTTP body, except for an overflow on a stream, which is a failed response."""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.errors import ContextOverflow, ModelyardError
from modelyard.core.events import Failed
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.openai_errors import read_http_error, write_http_error
from modelyard.protocols.openai_responses.writer import ResponsesWriter

_UNREAD = Request(model="")  # an error from before the body was read


def write_error(
    error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
) -> WireError:
    """Codex does not take HTTP 400 for an overflow: on a stream it must be `response.failed`."""
    if streaming and isinstance(error, ContextOverflow):
        events = ResponsesWriter(request or _UNREAD, trace).write(Failed(error))
        return WireError(200, events, {"x-request-id": trace}, "text/event-stream")
    return write_http_error(error, trace, overflow_param="input", request=request)


def read_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError:
    return read_http_error(status, headers, body)
