"""Errors ⇄ `{"type":"error","error":{type,message},"request_id"}`, and the overflow words that clients act on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.core import errors
from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow, Overloaded
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import ERROR_BY_STATUS, overflow_hint
from modelyard.protocols.common.json import encode

# kind → (HTTP status, Anthropic's word for it)
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


_LESS = "start Claude Code in its bare mode: modelyard launch claude -- --bare"


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001  # before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    body = error_body(error, trace, overflow_hint(error, request, _LESS))
    return WireError(_STATUS[error.kind][0], body, _headers(error, trace))


def error_body(error: ModelyardError, trace: str, more: str = "") -> bytes:
    told = {"type": _STATUS[error.kind][1], "message": _message(error) + (f".{more}" if more else "")}
    told |= {name: value for name in ("code", "param") if (value := getattr(error, name)) is not None}
    return encode({"type": "error", "error": told, "request_id": f"req_{trace}"})


def _message(error: ModelyardError) -> str:
    """Claude Code compacts or lowers max_tokens on exactly these words."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.window} maximum"
    if isinstance(error, OutputOverflow):
        return (
            f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens} > "
            f"{error.window}, decrease input length or `max_tokens` and try again"
        )
    return error.message


def _headers(error: ModelyardError, trace: str) -> dict[str, str]:
    headers = {"request-id": f"req_{trace}"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Overloaded) and error.position is not None:
        headers["x-queue-position"] = str(error.position)
    return headers


# --- reading --------------------------------------------------------------------------------------------------------

_PROMPT_TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
_OUTPUT_TOO_LONG = re.compile(r"`max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
# In a stream there is no status: the type has to stand for it.
_TYPE_STATUS: Mapping[str, int] = {
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
    """An upstream's answer as our error: the meaning survives, whatever the body looks like."""
    told = _fields(body)
    message = told.get("message") or body.decode("utf-8", "replace")[:500] or f"the upstream answered {status}"
    return _error(status, str(message), told, headers)


def read_stream_error(data: bytes) -> ModelyardError:
    status = _TYPE_STATUS.get(str(_fields(data).get("type")), 500)
    return read_error(status, {}, data)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    error = told.get("error") if isinstance(told, dict) else None
    return error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}


def _error(status: int, message: str, told: Mapping[str, Any], headers: Mapping[str, str]) -> ModelyardError:
    code, param = _word(told.get("code")), _word(told.get("param"))
    if found := _PROMPT_TOO_LONG.search(message):
        return ContextOverflow(int(found[1]), int(found[2]))
    if found := _OUTPUT_TOO_LONG.search(message):
        return OutputOverflow(int(found[1]), int(found[2]), int(found[3]))
    if cls := ERROR_BY_STATUS.get(status):
        return cls(message, code=code, param=param)
    retry_after = _number(headers.get("retry-after")) or 1.0
    if status == 429:
        return errors.RateLimited(message, retry_after=retry_after, code=code)
    if status in (502, 503) or (status == 529 and code not in (None, Overloaded.default_code)):
        return errors.Unavailable(message, retry_after=retry_after, code=code)
    if status == 529:
        position = _number(headers.get("x-queue-position"))
        return Overloaded(message, retry_after=retry_after, position=None if position is None else int(position))
    return errors.Internal(message, id=code or "upstream")


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(text: str | None) -> float | None:
    """Dates are allowed in Retry-After; nobody sends them, and a guess is better than a clock in here."""
    try:
        return float(text) if text else None
    except ValueError:
        return None
