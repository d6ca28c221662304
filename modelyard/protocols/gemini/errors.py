"""Errors → `{"error": {"code": 400, "message": "…", "status": "INVALID_ARGUMENT", "details": […]}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import STATUS_BY_KIND, overflow_hint, write_retry_headers
from modelyard.protocols.common.json import encode

_NAMES: Mapping[str, str] = {
    "invalid": "INVALID_ARGUMENT",
    "unauthenticated": "UNAUTHENTICATED",
    "forbidden": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "conflict": "ABORTED",
    "too_large": "INVALID_ARGUMENT",
    "rate_limited": "RESOURCE_EXHAUSTED",
    "overloaded": "UNAVAILABLE",
    "unavailable": "UNAVAILABLE",
    "timeout": "DEADLINE_EXCEEDED",
    "unimplemented": "UNIMPLEMENTED",
    "cancelled": "CANCELLED",
    "internal": "INTERNAL",
}
_TYPES = "type.googleapis.com/google.rpc."
_SMALLER_CLIENT = "choose a client that brings less along, for example aider: modelyard launch aider"


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    body = error_body(error, overflow_hint(error, request, _SMALLER_CLIENT))
    return WireError(STATUS_BY_KIND[error.kind], body, {"x-request-id": trace} | write_retry_headers(error))


def error_body(error: ModelyardError, hint: str = "") -> bytes:
    code, status = STATUS_BY_KIND[error.kind], _NAMES[error.kind]
    details: list[dict[str, Any]] = []
    if error.code:
        info = {"@type": _TYPES + "ErrorInfo", "reason": error.code.upper(), "domain": "modelyard"}
        param = "responseSchema" if error.param == "response_format" else error.param
        details.append(info | ({"metadata": {"field": param}} if param else {}))
    if error.retry_after is not None:
        details.append({"@type": _TYPES + "RetryInfo", "retryDelay": f"{error.retry_after:g}s"})
    fields: dict[str, Any] = {"code": code, "message": _message(error) + hint, "status": status}
    return encode({"error": fields | ({"details": details} if details else {})})


def _message(error: ModelyardError) -> str:
    """Google's words for a long prompt."""
    if isinstance(error, ContextOverflow):
        return (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.window})."
        )
    if isinstance(error, OutputOverflow):
        return (
            f"The input token count ({error.prompt_tokens}) and maxOutputTokens ({error.max_tokens}) exceed the "
            f"maximum number of tokens allowed ({error.window})."
        )
    return error.message
