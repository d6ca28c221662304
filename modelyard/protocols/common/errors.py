"""Error handling that every protocol shares: upstream status → error class, retry headers, the overflow hint."""

from __future__ import annotations

import re
from collections.abc import Mapping

from modelyard.core import errors
from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError, OutputOverflow, Overloaded
from modelyard.core.request import Message, Request, Text
from modelyard.protocols.common.json import encode

STATUS_BY_KIND: Mapping[str, int] = {
    "invalid": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "too_large": 413,
    "rate_limited": 429,
    "overloaded": 503,
    "unavailable": 503,
    "timeout": 504,
    "unimplemented": 501,
    "cancelled": 499,
    "internal": 500,
}
ERROR_BY_STATUS: Mapping[int, type[ModelyardError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthenticated,
    402: errors.Forbidden,
    403: errors.Forbidden,
    404: errors.NotFound,
    408: errors.Timeout,
    409: errors.Conflict,
    413: errors.TooLarge,
    422: errors.InvalidRequest,
    501: errors.Unimplemented,
    504: errors.Timeout,
}


def error_from_status(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after: float | None = None,
    position: int | None = None,
) -> ModelyardError:
    """The error that an upstream's HTTP status and error code mean."""
    retry_after = retry_after or 1.0
    if status == 429:
        return errors.RateLimited(message, retry_after=retry_after, code=code)
    if status == 529 or code == Overloaded.default_code:
        return Overloaded(message, retry_after=retry_after, position=position)
    if status == 499 or code == Cancelled.default_code:
        return Cancelled(message, code=code)
    if status in (502, 503):
        return errors.Unavailable(message, retry_after=retry_after, code=code)
    if cls := ERROR_BY_STATUS.get(status):
        return cls(message, code=code, param=param)
    return errors.Internal(message, id=code or "upstream")


def overflow_in(message: str, prompt: re.Pattern[str], output: re.Pattern[str]) -> ModelyardError | None:
    """The overflow that an upstream's message tells of. The patterns find its numbers, in a protocol's own words."""
    if found := prompt.search(message):
        return ContextOverflow(int(found[1]), int(found[2]))
    if found := output.search(message):
        return OutputOverflow(int(found[1]), int(found[2]), int(found[3]))
    return None


def write_retry_headers(error: ModelyardError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Overloaded) and error.position is not None:
        headers["x-queue-position"] = str(error.position)
    if isinstance(error, (Cancelled, errors.QuotaExceeded)):
        headers["x-should-retry"] = "false"  # the OpenAI and Anthropic SDKs obey
    return headers


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds. A date in Retry-After reads as None: no server in use sends one, and this module has no clock."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def overflow_hint(error: ModelyardError, request: Request | None, smaller_client: str) -> str:
    """A sentence to append to the overflow message when the client's system prompt and tools alone exceed the window.

    `smaller_client` says how to start such a client with a smaller prompt. Empty when the conversation itself is too
    long: the client can shorten that.
    """
    if not isinstance(error, ContextOverflow) or request is None or not request.tools:
        return ""
    needed = round(error.prompt_tokens * _client_share(request))
    if needed < error.window:
        return ""
    return (
        f" The client's own instructions and tools take about {needed} of them, so it cannot work with this window: "
        f"serve the model with a larger n_ctx, or {smaller_client}."
    )


def _client_share(request: Request) -> float:
    """The share of the prompt, in characters, that is system text and tool definitions."""
    visible = [tool for tool in request.tools if not tool.deferred and tool.kind != "server"]
    own = sum(len(encode([tool.description, tool.parameters])) for tool in visible)
    conversation = 0
    for message in request.messages:
        if message.role in ("system", "developer"):
            own += _size(message)
        else:
            conversation += _size(message)
    return own / max(1, own + conversation)


def _size(message: Message) -> int:
    return sum(len(part.text) if isinstance(part, Text) else len(encode(part)) for part in message.parts)
