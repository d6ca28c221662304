"""`response.error`: our errors in the words of a failed response, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelyard.core.errors import ContextOverflow, ModelyardError, Overloaded, RateLimited
from modelyard.core.request import Request
from modelyard.protocols.common.errors import overflow_hint
from modelyard.protocols.common.openai_errors import SMALLER_CLIENT, error_from_fields

# Word for word what Codex knows: on this it makes room and tries again.
OVERFLOW = "Your input exceeds the context window of this model. Please adjust your input and try again."

# code → the HTTP status that means the same, from which the error's class follows
_STATUS: Mapping[str, int] = {
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
_CLIENTS_DOING = frozenset({"invalid", "unauthenticated", "forbidden", "not_found", "conflict", "too_large"})
_AGAIN = re.compile(r"[Pp]lease try again in (?P<seconds>\d+(?:\.\d+)?)s\.?")


def write_failure(error: ModelyardError, request: Request | None = None) -> dict[str, str]:
    """Everything that is not the client's own doing is a `server_error`: clients try those again."""
    if isinstance(error, ContextOverflow):
        return {"code": "context_length_exceeded", "message": OVERFLOW + _more(error, request)}
    if error.kind in _CLIENTS_DOING:
        return {"code": error.code or "invalid_prompt", "message": error.message}
    if isinstance(error, RateLimited):  # Codex reads the pause out of the sentence
        return {"code": "rate_limit_exceeded", "message": f"{error.message} Please try again in {error.retry_after}s."}
    if isinstance(error, Overloaded):
        return {"code": "server_is_overloaded", "message": error.message}
    return {"code": "server_error", "message": error.message}


def _more(error: ContextOverflow, request: Request | None) -> str:
    told = overflow_hint(error, request, SMALLER_CLIENT)
    return f" It has {error.prompt_tokens} tokens, and the window {error.window}.{told}" if told else ""


def read_failure(told: object) -> ModelyardError:
    fields: dict[str, Any] = dict(told) if isinstance(told, Mapping) else {}
    message = str(fields.get("message") or "")
    again = _AGAIN.search(message)
    if again and again.end() == len(message):
        fields["message"] = message[: again.start()].rstrip()
    fields.setdefault("message", "the upstream failed without a word")
    return error_from_fields(_status(fields), fields, float(again["seconds"]) if again else None, b"")


def _status(fields: Mapping[str, Any]) -> int:
    code = str(fields.get("code") or fields.get("type") or "")
    return _STATUS.get(code, 400 if code.startswith(("invalid_", "image_")) else 502)
