"""Errors ⇄ `{"error": {"code": 400, "message": "…", "status": "INVALID_ARGUMENT", "details": […]}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import (
    STATUS_BY_KIND,
    error_from_status,
    overflow_hint,
    overflow_in,
    read_retry_after,
    write_retry_headers,
)
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


# --- reading an upstream's error ------------------------------------------------------------------------------------

_PROMPT_TOO_LONG = re.compile(r"token count \(?(\d+)\)? exceeds the maximum number of tokens allowed \(?(\d+)\)?")
_OUTPUT_TOO_LONG = re.compile(r"token count \((\d+)\) and maxOutputTokens \((\d+)\) exceed the maximum .* \((\d+)\)")


def read_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError:
    """Any upstream error response, whatever its body looks like."""
    fields = _fields(body)
    message = str(fields.get("message") or body.decode("utf-8", "replace")[:500] or f"the upstream answered {status}")
    return _error(status, fields, message, read_retry_after(headers))


def read_error_field(error: object) -> ModelyardError:
    """The `error` of a chunk, whose code is an HTTP status."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    code = fields.get("code")
    message = str(fields.get("message") or "the upstream reported an error")
    return _error(code if isinstance(code, int) else 500, fields, message, None)


def _error(status: int, fields: Mapping[str, Any], message: str, retry_after: float | None) -> ModelyardError:
    if overflow := overflow_in(message, _PROMPT_TOO_LONG, _OUTPUT_TOO_LONG):
        return overflow
    details = [one for one in fields.get("details") or () if isinstance(one, dict)]
    reason = next((one["reason"] for one in details if isinstance(one.get("reason"), str)), None)
    ours = any(one.get("domain") == "modelyard" for one in details)
    metadata: dict[str, Any] = next((one["metadata"] for one in details if isinstance(one.get("metadata"), dict)), {})
    delay = next((one["retryDelay"] for one in details if isinstance(one.get("retryDelay"), str)), "")
    if retry_after is None and re.fullmatch(r"\d+(\.\d+)?s", delay):
        retry_after = float(delay[:-1])
    param = metadata.get("field")
    return error_from_status(
        status,
        message,
        code=reason.lower() if reason and ours else None,
        param=param if isinstance(param, str) else None,
        retry_after=retry_after,
    )


def _fields(body: bytes) -> dict[str, Any]:
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(payload, list):  # a refused stream answers with an array
        payload = payload[0] if payload else None
    error = payload.get("error") if isinstance(payload, dict) else None
    return error if isinstance(error, dict) else {}
