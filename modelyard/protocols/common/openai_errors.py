"""OpenAI's error body `{"error": {message, type, param, code}}`, both ways, for every OpenAI-shaped protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow, Overloaded
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import error_from_status, overflow_hint, read_retry_after, write_retry_headers
from modelyard.protocols.common.json import encode

# kind → (HTTP status, OpenAI's error type)
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


def _own_name(param: str | None, conversation: str) -> str | None:
    """The client's name of a field: the gateway says it in the words of Chat Completions, and of Messages for what
    Chat Completions lacks."""
    if param == "messages":
        return conversation
    if param == "mcp_servers":
        return "tools"
    return "text.format" if param == "response_format" and conversation == "input" else param


def error_body(error: ModelyardError, overflow_param: str = "messages") -> dict[str, Any]:
    """`overflow_param` is the field that holds the conversation in this protocol."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": STATUS[error.kind][1],
        "param": _own_name(error.param, overflow_param),
        "code": error.code,
    }
    if isinstance(error, ContextOverflow):
        body["message"] = (
            f"This model's maximum context length is {error.window} tokens. However, your messages resulted in "
            f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    elif isinstance(error, OutputOverflow):
        body["message"] = (
            f"This model's maximum context length is {error.window} tokens. However, you requested "
            f"{error.prompt_tokens + error.max_tokens} tokens ({error.prompt_tokens} in the messages, "
            f"{error.max_tokens} in the completion). Please reduce the length of the messages or completion."
        )
    if isinstance(error, ContextOverflow | OutputOverflow):
        body |= {"param": overflow_param, "n_prompt_tokens": error.prompt_tokens, "n_ctx": error.window}
    elif isinstance(error, Overloaded) and error.position is not None:
        body["queue_position"] = error.position
    return body


def write_http_error(
    error: ModelyardError, trace: str, overflow_param: str = "messages", request: Request | None = None
) -> WireError:
    body = error_body(error, overflow_param)
    body["message"] += overflow_hint(error, request, SMALLER_CLIENT)
    headers = {"x-request-id": trace} | write_retry_headers(error)
    return WireError(STATUS[error.kind][0], encode({"error": body}), headers)


def http_error_writer(overflow_param: str, overflow_type: str | None = None) -> Callable[..., WireError]:
    """The `write_error` of a protocol whose streams fail, before their first byte, like any other request.
    `overflow_type` is llama-server's type of a prompt that does not fit, which it says in its own words."""

    def write_error(error: ModelyardError, *, trace: str, streaming: bool = False, request: Any = None) -> WireError:
        del streaming, request
        written = write_http_error(error, trace, overflow_param)
        if overflow_type is not None and isinstance(error, ContextOverflow):
            message = f"the request ({error.prompt_tokens} tokens) exceeds the available context size ({error.window})"
            body = error_body(error, overflow_param) | {"type": overflow_type, "message": message}
            return WireError(written.status, encode({"error": body}), written.headers)
        return written

    return write_error


# --- reading an upstream's error ------------------------------------------------------------------------------------

# An error chunk inside a stream has no HTTP status; its code or type gives one.
_STATUS_BY_CODE: Mapping[str, int] = {
    "server_is_overloaded": 503,
    "engine_unavailable": 503,
    "engine_died": 503,
    "rate_limit_exceeded": 429,
}
_STATUS_BY_TYPE: Mapping[str, int] = {
    name: status for status, name in STATUS.values() if name not in ("server_error", "invalid_request_error")
} | {"invalid_request_error": 400, "exceed_context_size_error": 400, "overloaded_error": 529}


def read_http_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError:
    """Any upstream error response, whatever its body looks like."""
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        payload = None
    if isinstance(payload, list) and payload:  # Google's endpoint wraps it
        payload = payload[0]
    error = payload.get("error", payload) if isinstance(payload, dict) else None
    return error_from_fields(status, _fields(error), read_retry_after(headers), body)


def read_error_field(error: object) -> ModelyardError:
    """The value of an `error` key without an HTTP status: in a chunk, or in a body with status 200."""
    fields = _fields(error)
    code = fields.get("code")
    if isinstance(code, int):
        status = code
    else:
        status = _STATUS_BY_CODE.get(str(code)) or _STATUS_BY_TYPE.get(str(fields.get("type")), 500)
    return error_from_fields(status, fields, None, b"the upstream reported an error")


def _fields(error: object) -> dict[str, Any]:
    if isinstance(error, dict):
        return error
    return {"message": str(error)} if error else {}


def error_from_fields(status: int, fields: Mapping[str, Any], retry_after: float | None, body: bytes) -> ModelyardError:
    message = str(fields.get("message") or body.decode("utf-8", "replace")[:500] or f"upstream answered {status}")
    if overflow := _read_overflow(fields, message):
        return overflow
    code, param, position = fields.get("code"), fields.get("param"), fields.get("queue_position")
    if retry_after is None and (delay := _RETRY_DELAY.search(str(fields.get("details", "")))):
        retry_after = float(delay[1])
    return error_from_status(
        status,
        message,
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        retry_after=retry_after,
        position=position if isinstance(position, int) else None,
    )


_RETRY_DELAY = re.compile(r"'retryDelay': '(\d+(?:\.\d+)?)s'")  # Google's RetryInfo
_WINDOW = re.compile(r"maximum (?:context|model) length (?:is |of |\()(\d+)|maximum number of tokens allowed \(?(\d+)")
_PROMPT = re.compile(
    r"(?:resulted in|requested|request has|contains(?: at least)?) (\d+)(?: input)? tokens"
    r"|(?:[Ii]nput length|prompt) \((?:length )?(\d+)\)|token count \(?(\d+)\)? exceeds"
)
_UPPER_BOUND = re.compile(r"upper bound for (\d+) input tokens")  # the prompt was too long to be tokenized
_PARTS = re.compile(r"\((\d+) in the messages, (\d+) in the completion\)")
_BOTH = re.compile(r"requested (?P<output>\d+) output tokens and your prompt contains(?: at least)? (?P<prompt>\d+)")


def _read_overflow(fields: Mapping[str, Any], message: str) -> ModelyardError | None:
    """Servers agree on the sentence more than on the fields. None when the numbers are missing."""
    window = fields.get("n_ctx") or _number(_WINDOW, message)
    if not isinstance(window, int):
        return None
    if parts := _PARTS.search(message):
        return OutputOverflow(int(parts[1]), int(parts[2]), window)
    if (both := _BOTH.search(message)) and int(both["prompt"]) < window:
        return OutputOverflow(int(both["prompt"]), int(both["output"]), window)
    prompt = fields.get("n_prompt_tokens") or _number(_PROMPT, message)
    if prompt is None and (bound := _number(_UPPER_BOUND, message)) is not None:
        prompt = max(bound, window) + 1
    return ContextOverflow(prompt, window) if isinstance(prompt, int) else None


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(filter(None, found.groups()))) if found else None
