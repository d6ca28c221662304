"""Errors in the pool dialect: Chat's body, in which `code` is always a word; in a stream, too."""

from __future__ import annotations

from typing import Any

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireError
from modelyard.core.request import Request
from modelyard.protocols.common.errors import write_retry_headers
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_errors import STATUS, error_body

_UNNAMED = "invalid_request"


def coded_body(error: ModelyardError) -> dict[str, Any]:
    body = error_body(error)
    return body | {"code": body["code"] or (_UNNAMED if error.kind == "invalid" else error.kind)}


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte both are told alike
    request: Request | None = None,  # noqa: ARG001
) -> WireError:
    headers = {"x-request-id": trace} | write_retry_headers(error)
    return WireError(STATUS[error.kind][0], encode({"error": coded_body(error)}), headers)
