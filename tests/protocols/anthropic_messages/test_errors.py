"""Errors in Anthropic's envelope, and back."""

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


@pytest.mark.parametrize(("error", "status", "word"), CASES)
def test_every_kind_has_its_status_and_word(error: ModelyardError, status: int, word: str) -> None:
    wire = write_error(error, trace="t")
    body = msgspec.json.decode(wire.body)
    assert (wire.status, body["type"], body["error"]["type"]) == (status, "error", word)
    assert body["request_id"] == wire.headers["request-id"] == "req_t"


@pytest.mark.parametrize(("error", "status", "word"), CASES)
def test_every_error_survives_the_wire(error: ModelyardError, status: int, word: str) -> None:
    wire = write_error(error, trace="t", streaming=True)
    assert read_error(wire.status, wire.headers, wire.body) == error


def test_every_kind_of_error_can_be_written() -> None:
    cancelled = write_error(errors.Cancelled("gone"), trace="t")
    assert cancelled.status == 499


def test_overflow_is_told_in_the_words_that_clients_act_on() -> None:
    def message(error: ModelyardError) -> str:
        text: str = msgspec.json.decode(write_error(error, trace="t").body)["error"]["message"]
        return text

    assert message(errors.ContextOverflow(40, 30)) == "prompt is too long: 40 tokens > 30 maximum"
    assert message(errors.OutputOverflow(20, 15, 30)) == (
        "input length and `max_tokens` exceed context limit: 20 + 15 > 30, "
        "decrease input length or `max_tokens` and try again"
    )


def test_a_full_queue_says_when_to_come_back_and_how_long_it_is() -> None:
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
def test_foreign_error_bodies_keep_their_meaning(
    status: int, headers: dict[str, str], body: bytes, error: ModelyardError
) -> None:
    assert read_error(status, headers, body) == error
