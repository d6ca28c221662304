"""`response.error`, the error of a failed response, both ways; HTTP errors have OpenAI's common body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError, Overloaded, QuotaExceeded, RateLimited
from modelyard.core.request import Request
from modelyard.protocols.common.errors import overflow_hint
from modelyard.protocols.common.openai_errors import SMALLER_CLIENT, error_from_fields, read_http_error

read_error = read_http_error

# Codex compacts the conversation and retries when it finds exactly these words.
OVERFLOW = "Your input exceeds the context window of this model. Please adjust your input and try again."

_CLIENT_ERRORS = frozenset({"invalid", "unauthenticated", "forbidden", "not_found", "conflict", "too_large"})


def write_failure(error: ModelyardError, request: Request | None = None) -> dict[str, str]:
    """Every error that is not the client's is a `server_error`: clients retry those."""
    if isinstance(error, ContextOverflow):
        message = OVERFLOW
        if hint := overflow_hint(error, request, SMALLER_CLIENT):
            message += f" It has {error.prompt_tokens} tokens, and the window {error.window}.{hint}"
        return {"code": "context_length_exceeded", "message": message}
    if isinstance(error, Cancelled):  # Codex repeats the request for every code that it does not know
        return {"code": "invalid_prompt", "message": error.message}
    if error.kind in _CLIENT_ERRORS:
        return {"code": error.code or "invalid_prompt", "message": error.message}
    if isinstance(error, QuotaExceeded):
        return {"code": "insufficient_quota", "message": error.message}
    if isinstance(error, RateLimited):  # Codex parses the delay out of the message
        return {"code": "rate_limit_exceeded", "message": f"{error.message} Please try again in {error.retry_after}s."}
    if isinstance(error, Overloaded):
        return {"code": "server_is_overloaded", "message": error.message}
    return {"code": "server_error", "message": error.message}


# --- reading an upstream's failure ----------------------------------------------------------------------------------

# code → the HTTP status with the same meaning
_STATUS_BY_CODE: Mapping[str, int] = {
    "context_length_exceeded": 400,
    "invalid_prompt": 400,
    "unsupported": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "request_too_large": 413,
    "rate_limit_exceeded": 429,
    "server_is_overloaded": 529,
    "slow_down": 529,
    "server_error": 502,
}
_RETRY_AFTER = re.compile(r"[Pp]lease try again in (?P<seconds>\d+(?:\.\d+)?)s\.?")


def read_failure(error: object) -> ModelyardError:
    fields: dict[str, Any] = dict(error) if isinstance(error, Mapping) else {}
    message = str(fields.get("message") or "")
    delay = _RETRY_AFTER.search(message)
    if delay and delay.end() == len(message):
        fields["message"] = message[: delay.start()].rstrip()
    fields.setdefault("message", "the upstream failed without a message")
    code = str(fields.get("code") or fields.get("type") or "")
    status = _STATUS_BY_CODE.get(code, 400 if code.startswith(("invalid_", "image_")) else 502)
    return error_from_fields(status, fields, float(delay["seconds"]) if delay else None, b"")
