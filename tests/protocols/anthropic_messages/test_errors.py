"""Errors in Anthropic's error body, and back."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.core import errors
from modelyard.core.errors import ModelyardError
from modelyard.protocols.anthropic_messages import read_error, write_error

CASES: list[tuple[ModelyardError, int, str]] = [
    (errors.InvalidRequest("a", param="messages", code="c"), 400, "invalid_request_error"),
    (errors.Unauthenticated("a"), 401, "authentication_error"),
    (errors.Forbidden("a", code="remote_not_allowed"), 403, "permission_error"),
    (errors.NotFound("a", code="model_not_found", param="model"), 404, "not_found_error"),
    (errors.Conflict("a", code="model_not_loaded"), 409, "invalid_request_error"),
    (errors.TooLarge("a"), 413, "request_too_large"),
    (errors.RateLimited("a", retry_after=7), 429, "rate_limit_error"),
    (errors.Internal("a", id="internal_error"), 500, "api_error"),
    (errors.Unimplemented("a"), 501, "api_error"),
    (errors.Timeout("a"), 504, "timeout_error"),
    (errors.Overloaded("a", retry_after=3, position=9), 529, "overloaded_error"),
    (errors.Unavailable("a", retry_after=2), 529, "overloaded_error"),
    (errors.ContextOverflow(215_692, 200_000), 400, "invalid_request_error"),
    (errors.OutputOverflow(100, 50, 120), 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("error", "status", "error_type"), CASES)
def test_every_error_has_its_status_and_type_and_reads_back(
    error: ModelyardError, status: int, error_type: str
) -> None:
    written = write_error(error, trace="t")
    body = msgspec.json.decode(written.body)
    assert (written.status, body["type"], body["error"]["type"]) == (status, "error", error_type)
    assert body["request_id"] == written.headers["request-id"] == "req_t"
    assert read_error(written.status, written.headers, written.body) == error


def test_a_cancelled_request_has_status_499() -> None:
    assert write_error(errors.Cancelled("gone"), trace="t").status == 499


def test_overflow_messages_are_those_that_clients_act_on() -> None:
    def message(error: ModelyardError) -> str:
        text: str = msgspec.json.decode(write_error(error, trace="t").body)["error"]["message"]
        return text

    assert message(errors.ContextOverflow(40, 30)) == "prompt is too long: 40 tokens > 30 maximum"
    assert message(errors.OutputOverflow(20, 15, 30)) == (
        "input length and `max_tokens` exceed context limit: 20 + 15 > 30, "
        "decrease input length or `max_tokens` and try again"
    )


def test_a_full_queue_sends_retry_after_and_the_queue_position() -> None:
    headers = write_error(errors.Overloaded("full", retry_after=2.4, position=9), trace="t").headers
    assert headers == {"request-id": "req_t", "retry-after": "2", "x-queue-position": "9"}


@pytest.mark.parametrize(
    ("status", "headers", "body", "error"),
    [
        (400, {}, b"<html>", errors.InvalidRequest("<html>")),
        (404, {}, b"", errors.NotFound("the upstream answered 404")),
        (503, {"retry-after": "5"}, b'{"error":"busy"}', errors.Unavailable("busy", retry_after=5)),
        (429, {"retry-after": "Wed, 21 Oct 2026"}, b"slow", errors.RateLimited("slow", retry_after=1)),
        (500, {}, b'{"error":{"message":"oh"}}', errors.Internal("oh", id="upstream")),
        (413, {}, b"[" * 5000, errors.TooLarge("[" * 500)),
    ],
)
def test_foreign_error_bodies_are_read(
    status: int, headers: dict[str, str], body: bytes, error: ModelyardError
) -> None:
    assert read_error(status, headers, body) == error
