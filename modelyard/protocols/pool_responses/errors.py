"""Errors of the pool dialect: Chat's error body, in which `code` is never null; in a stream too."""

from __future__ import annotations

from typing import Any

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import write_retry_headers
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_errors import STATUS, error_body


def coded_body(error: ModelyardError, request: Request | None = None) -> dict[str, Any]:
    turns = [] if request is None else [message for message in request.messages if message.role != "system"]
    body = error_body(error, "input" if len(turns) == 1 else "messages")
    return body | {"code": body["code"] or ("invalid_request" if error.kind == "invalid" else error.kind)}


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    headers = {"x-request-id": trace} | write_retry_headers(error)
    return WireError(STATUS[error.kind][0], encode({"error": coded_body(error, request)}), headers)
