from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core import errors
from modelyard.protocols import pool_responses


def write(error: errors.ModelyardError, **more: Any) -> tuple[int, Any]:
    written = pool_responses.write_error(error, trace="t", **more)
    return written.status, msgspec.json.decode(written.body)["error"]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_overflow_has_chats_error_body(streaming: bool) -> None:
    status, error = write(errors.ContextOverflow(40123, 32768), streaming=streaming)
    assert status == 400
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 40123, 32768)
    assert error["message"].startswith("This model's maximum context length is 32768 tokens.")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("x"), 400, "invalid_request"),
        (errors.Unsupported("x", code="modality_unsupported"), 400, "modality_unsupported"),
        (errors.Forbidden("x", code="remote_not_allowed"), 403, "remote_not_allowed"),
        (errors.NotFound("x", code="model_not_found"), 404, "model_not_found"),
        (errors.Conflict("x", code="model_not_loaded"), 409, "model_not_loaded"),
        (errors.ModelyardError("x"), 500, "internal"),
    ],
)
def test_every_error_has_a_code(error: errors.ModelyardError, status: int, code: str) -> None:
    written, body = write(error)
    assert (written, body["code"]) == (status, code)


def test_a_full_queue_has_retry_headers() -> None:
    written = pool_responses.write_error(errors.Overloaded("full", retry_after=3, position=7), trace="t")
    assert (written.status, written.headers["retry-after"], written.headers["x-queue-position"]) == (503, "3", "7")
