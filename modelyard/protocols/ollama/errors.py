"""Errors ⇄ `{"error": "…"}`. In a stream the same object is a line."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import (
    STATUS_BY_KIND,
    error_from_status,
    overflow_in,
    read_retry_after,
    write_retry_headers,
)
from modelyard.protocols.common.json import encode


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,  # noqa: ARG001
) -> WireError:
    headers = {"x-request-id": trace} | write_retry_headers(error)
    return WireError(STATUS_BY_KIND[error.kind], error_body(error), headers)


def error_body(error: ModelyardError) -> bytes:
    return encode({"error": _message(error)})


def _message(error: ModelyardError) -> str:
    """With Ollama's words where clients know them."""
    if isinstance(error, ContextOverflow):
        return (
            f"the input length exceeds the context length: the prompt has {error.prompt_tokens} tokens, "
            f"the context {error.window}"
        )
    if isinstance(error, OutputOverflow):
        return (
            f"the input length and num_predict exceed the context length: {error.prompt_tokens} + {error.max_tokens} "
            f"> {error.window}"
        )
    return error.message


# --- reading an upstream's error ------------------------------------------------------------------------------------

_PROMPT_TOO_LONG = re.compile(r"exceeds the context length: the prompt has (\d+) tokens, the context (\d+)")
_OUTPUT_TOO_LONG = re.compile(r"exceed the context length: (\d+) \+ (\d+) > (\d+)")


def read_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError:
    """Any upstream error response, whatever its body looks like."""
    return _error(status, _text(body), read_retry_after(headers))


def read_line_error(error: object) -> ModelyardError:
    """The `error` of a line. It has no status."""
    fields = error if isinstance(error, dict) else {"message": error}
    return _error(500, str(fields.get("message") or "the upstream reported an error"), None)


def _error(status: int, text: str, retry_after: float | None) -> ModelyardError:
    overflow = overflow_in(text, _PROMPT_TOO_LONG, _OUTPUT_TOO_LONG)
    return overflow or error_from_status(status, text or f"the upstream answered {status}", retry_after=retry_after)


def _text(body: bytes) -> str:
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        payload = None
    error = payload.get("error") if isinstance(payload, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error) if error else body.decode("utf-8", "replace")[:500]
