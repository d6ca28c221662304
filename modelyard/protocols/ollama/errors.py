"""Errors → `{"error": "…"}`. In a stream the same object is a line."""

from __future__ import annotations

from modelyard.core.errors import ContextOverflow, ModelyardError, OutputOverflow
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import STATUS_BY_KIND, write_retry_headers
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
