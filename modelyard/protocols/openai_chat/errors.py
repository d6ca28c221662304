"""Errors of the chat protocol: OpenAI's HTTP error body, for streams too."""

from __future__ import annotations

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.openai_errors import read_http_error, write_http_error

read_error = read_http_error


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    return write_http_error(error, trace, request=request)
