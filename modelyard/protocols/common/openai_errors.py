"""OpenAI's error body, shared by every OpenAI-shaped wire: `{"error": {message, type, param, code}}`."""

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

# kind → (HTTP status, OpenAI's word for it)
STATUS: Mapping[str, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "conflict": (409, "conflict_error"),
    "too_large": (413, "invalid_request_error"),
    "rate_limited": (429, "rate_limit_error"),
    "overloaded": (503, "server_error"),
    "unavailable": (503, "server_error"),
    "timeout": (504, "timeout_error"),
    "unimplemented": (501, "not_implemented_error"),
    "cancelled": (499, "cancelled"),
    "internal": (500, "server_error"),
}


SMALLER_CLIENT = "choose a client that brings less along, for example aider: modelyard launch aider"


def error_body(error: ModelyardError, overflow_param: str = "messages") -> dict[str, Any]:
    """`overflow_param` is the field that holds the conversation on this wire."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": STATUS[error.kind][1],
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, ContextOverflow):
        body["message"] = (
            f"This model's maximum context length is {error.window} tokens. However, your messages resulted in "
            f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
        body |= {"param": overflow_param, "n_prompt_tokens": error.prompt_tokens, "n_ctx": error.window}
    elif isinstance(error, OutputOverflow):
        body["message"] = (
            f"This model's maximum context length is {error.window} tokens. However, you requested "
            f"{error.prompt_tokens + error.max_tokens} tokens ({error.prompt_tokens} in the messages, "
            f"{error.max_tokens} in the completion). Please reduce the length of the messages or completion."
        )
        body |= {"param": overflow_param, "n_prompt_tokens": error.prompt_tokens, "n_ctx": error.window}
    elif isinstance(error, Overloaded) and error.position is not None:
        body["queue_position"] = error.position
    return body


def retry_headers(error: ModelyardError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Overloaded) and error.position is not None:
        headers["x-queue-position"] = str(error.position)
    return headers


def write_http_error(
    error: ModelyardError, trace: str, overflow_param: str = "messages", request: Request | None = None
) -> WireError:
    status = STATUS[error.kind][0]
    headers = {"x-request-id": trace} | retry_headers(error)
    body = error_body(error, overflow_param)
    body["message"] += overflow_hint(error, request, SMALLER_CLIENT)
    return WireError(status, encode({"error": body}), headers)


# What an error chunk inside a stream has instead of an HTTP status.
_BY_CODE: Mapping[str, int] = {"server_is_overloaded": 503, "engine_unavailable": 503, "rate_limit_exceeded": 429}
_BY_TYPE: Mapping[str, int] = {
    word: status for status, word in STATUS.values() if word not in ("server_error", "invalid_request_error")
} | {"invalid_request_error": 400, "exceed_context_size_error": 400, "overloaded_error": 529}


def read_http_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError:
    """An upstream's answer as our error: the meaning survives, whatever the body looks like."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = None
    error = told.get("error", told) if isinstance(told, dict) else None
    return error_from_fields(status, _fields(error), _retry_after(headers), body)


def read_error_field(error: object) -> ModelyardError:
    """The value of an `error` key that came without an HTTP status of its own: in a chunk, or in a 200 body."""
    fields = _fields(error)
    return error_from_fields(_status(fields), fields, None, b"the upstream reported an error")


def _fields(error: object) -> dict[str, Any]:
    if isinstance(error, dict):
        return error
    return {"message": str(error)} if error else {}


def _status(fields: Mapping[str, Any]) -> int:
    code = fields.get("code")
    if isinstance(code, int):
        return code
    return _BY_CODE.get(str(code)) or _BY_TYPE.get(str(fields.get("type")), 500)


def error_from_fields(status: int, fields: Mapping[str, Any], retry_after: float | None, body: bytes) -> ModelyardError:
    message = str(fields.get("message") or body.decode("utf-8", "replace")[:500] or f"upstream answered {status}")
    told = fields.get("code")
    code = told if isinstance(told, str) else None
    if overflow := _read_overflow(fields, message):
        return overflow
    if status == 429:
        return errors.RateLimited(message, retry_after=retry_after or 1.0, code=code)
    if code == "server_is_overloaded" or status == 529:
        position = fields.get("queue_position")
        return Overloaded(
            message, retry_after=retry_after or 1.0, position=position if isinstance(position, int) else None
        )
    if status in (502, 503):
        return errors.Unavailable(message, retry_after=retry_after or 1.0, code=code)
    if cls := ERROR_BY_STATUS.get(status):
        param = fields.get("param")
        return cls(message, code=code, param=param if isinstance(param, str) else None)
    return errors.Internal(message, id=code or "upstream")


_WINDOW = re.compile(r"maximum (?:context|model) length (?:is |of |\()(\d+)")
_ASKED = re.compile(
    r"(?:resulted in|requested|request has|contains(?: at least)?) (\d+)(?: input)? tokens"
    r"|(?:[Ii]nput length|prompt) \((?:length )?(\d+)\)"
)
_BOUND = re.compile(r"upper bound for (\d+) input tokens")  # of a prompt so long that nobody has counted it
_PARTS = re.compile(r"\((\d+) in the messages, (\d+) in the completion\)")
_BOTH = re.compile(r"requested (?P<output>\d+) output tokens and your prompt contains(?: at least)? (?P<prompt>\d+)")


def _read_overflow(fields: Mapping[str, Any], message: str) -> ModelyardError | None:
    """Servers agree on the sentence more than on the fields; without true numbers it stays a plain refusal."""
    window = fields.get("n_ctx") or _number(_WINDOW, message)
    if not isinstance(window, int):
        return None
    if parts := _PARTS.search(message):
        return OutputOverflow(int(parts[1]), int(parts[2]), window)
    if (both := _BOTH.search(message)) and int(both["prompt"]) < window:
        return OutputOverflow(int(both["prompt"]), int(both["output"]), window)
    prompt = fields.get("n_prompt_tokens") or _number(_ASKED, message)
    if prompt is None and (bound := _number(_BOUND, message)) is not None:
        prompt = max(bound, window) + 1
    return ContextOverflow(prompt, window) if isinstance(prompt, int) else None


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(filter(None, found.groups()))) if found else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None  # a date, or nothing
    return seconds if 0 <= seconds < float("inf") else None
