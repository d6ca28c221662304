"""Errors ⇄ `{"type":"error","error":{type,message},"request_id"}`, with the overflow messages that clients act on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow, Overloaded
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import (
    error_from_status,
    overflow_hint,
    overflow_in,
    read_retry_after,
    write_retry_headers,
)
from modelyard.protocols.common.json import encode

# kind → (HTTP status, Anthropic's error type)
_STATUS: Mapping[str, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "conflict": (409, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "rate_limited": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "unavailable": (529, "overloaded_error"),
    "timeout": (504, "timeout_error"),
    "unimplemented": (501, "api_error"),
    "cancelled": (499, "api_error"),
    "internal": (500, "api_error"),
}
_SMALLER_CLIENT = "start Claude Code in its bare mode: modelyard launch claude -- --bare"


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    body = error_body(error, trace, overflow_hint(error, request, _SMALLER_CLIENT))
    headers = {"request-id": f"req_{trace}"} | write_retry_headers(error)
    return WireError(_STATUS[error.kind][0], body, headers)


def error_body(error: ModelyardError, trace: str, hint: str = "") -> bytes:
    fields: dict[str, Any] = {"type": _STATUS[error.kind][1], "message": _message(error) + (f".{hint}" if hint else "")}
    param = "output_config.format" if error.param == "response_format" else error.param
    fields |= {name: value for name, value in (("code", error.code), ("param", param)) if value is not None}
    if error.code is not None and error.code.startswith(("thread_", "compaction_")):
        fields["details"] = {"error_code": error.code}  # the SDK's threads act on it
    return encode({"type": "error", "error": fields, "request_id": f"req_{trace}"})


def _message(error: ModelyardError) -> str:
    """Claude Code compacts the conversation or lowers max_tokens when it finds exactly these words."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.window} maximum"
    if isinstance(error, OutputOverflow):
        return (
            f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens} > "
            f"{error.window}, decrease input length or `max_tokens` and try again"
        )
    return error.message


# --- reading an upstream's error ------------------------------------------------------------------------------------

_PROMPT_TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
_OUTPUT_TOO_LONG = re.compile(r"`max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
# An error event in a stream has no HTTP status; its type gives one.
_STATUS_BY_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def read_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError:
    """Any upstream error response, whatever its body looks like."""
    fields = _fields(body)
    message = str(fields.get("message") or body.decode("utf-8", "replace")[:500] or f"the upstream answered {status}")
    if overflow := overflow_in(message, _PROMPT_TOO_LONG, _OUTPUT_TOO_LONG):
        return overflow
    code, param = (value if isinstance(value := fields.get(name), str) else None for name in ("code", "param"))
    if status == 529 and code not in (None, Overloaded.default_code):
        status = 503  # written for «unavailable» too, which has a code of its own
    position = headers.get("x-queue-position", "")
    return error_from_status(
        status,
        message,
        code=code,
        param=param,
        retry_after=read_retry_after(headers),
        position=int(position) if position.isdecimal() else None,
    )


def read_stream_error(data: bytes) -> ModelyardError:
    status = _STATUS_BY_TYPE.get(str(_fields(data).get("type")), 500)
    return read_error(status, {}, data)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    error = payload.get("error") if isinstance(payload, dict) else None
    return error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}
