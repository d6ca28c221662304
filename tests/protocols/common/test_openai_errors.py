from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core import errors
from modelyard.core.errors import ContextOverflow, InvalidRequest, ModelyardError, OutputOverflow, Overloaded
from modelyard.protocols.common.openai_errors import (
    STATUS,
    error_body,
    read_error_field,
    read_http_error,
    write_http_error,
)


def both_ways(error: ModelyardError) -> ModelyardError:
    written = write_http_error(error, "t")
    return read_http_error(written.status, written.headers, written.body)


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (InvalidRequest("bad", param="n", code="c"), 400, "invalid_request_error"),
        (errors.Unauthenticated("who?"), 401, "authentication_error"),
        (errors.Forbidden("no"), 403, "permission_error"),
        (errors.NotFound("none"), 404, "not_found_error"),
        (errors.Conflict("not loaded", code="model_not_loaded"), 409, "conflict_error"),
        (errors.TooLarge("big"), 413, "invalid_request_error"),
        (errors.RateLimited("slow down", retry_after=7.0), 429, "rate_limit_error"),
        (Overloaded("full", retry_after=3.0, position=4), 503, "server_error"),
        (errors.Unavailable("lost", retry_after=2.0), 503, "server_error"),
        (errors.Timeout("late"), 504, "timeout_error"),
        (errors.Unimplemented("never"), 501, "not_implemented_error"),
        (ContextOverflow(40, 32), 400, "invalid_request_error"),
        (OutputOverflow(20, 20, 32), 400, "invalid_request_error"),
    ],
)
def test_every_error_has_its_status_and_type_and_reads_back(
    error: ModelyardError, status: int, error_type: str
) -> None:
    written = write_http_error(error, "t")
    assert written.status == status
    assert msgspec.json.decode(written.body)["error"]["type"] == error_type
    assert both_ways(error) == error


def test_every_kind_of_error_has_a_status() -> None:
    kinds = {cls.kind for cls in _tree(ModelyardError)}
    assert kinds == set(STATUS)


def _tree(cls: type[ModelyardError]) -> list[type[ModelyardError]]:
    ours = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(found for sub in ours for found in _tree(sub))]


def test_an_internal_error_has_its_message_and_code() -> None:
    written = msgspec.json.decode(write_http_error(errors.Internal(id="x1", message="oops"), "t").body)["error"]
    assert written == {"message": "oops", "type": "server_error", "param": None, "code": "internal_error"}
    assert isinstance(both_ways(errors.Internal("oops", id="x1")), errors.Internal)


def test_an_overflow_has_both_numbers_and_the_field() -> None:
    body = error_body(ContextOverflow(40123, 32768), "prompt")
    assert body == {
        "message": "This model's maximum context length is 32768 tokens. However, your messages resulted in 40123 "
        "tokens. Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
        "n_prompt_tokens": 40123,
        "n_ctx": 32768,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "message": "This model's maximum context length is 4096 tokens. However, your request has 5000 input "
                "tokens."
            },
            ContextOverflow(5000, 4096),
        ),
        (
            {
                "message": "too big",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 99,
                "n_ctx": 64,
                "code": 400,
            },
            ContextOverflow(99, 64),
        ),
        (
            {
                "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
                "(4000 in the messages, 1000 in the completion)."
            },
            OutputOverflow(4000, 1000, 4096),
        ),
        (
            {
                "message": "This model's maximum context length is 2048 tokens. However, your prompt contains 3031 "
                "input tokens, which exceeds this limit even without any output tokens.",
                "type": "BadRequestError",
                "param": "input_tokens",
                "code": 400,
            },
            ContextOverflow(3031, 2048),
        ),
        (
            {
                "message": "This model's maximum context length is 2048 tokens. However, your prompt contains 99000 "
                "characters (more than 65536 characters, which is the upper bound for 2048 input tokens)."
            },
            ContextOverflow(2049, 2048),
        ),
        (
            {
                "message": "This model's maximum context length is 2048 tokens. However, you requested 1500 output "
                "tokens and your prompt contains at least 1031 input tokens, for a total of at least 2531 tokens."
            },
            OutputOverflow(1031, 1500, 2048),
        ),
        (
            {"message": "Input length (3031) exceeds model's maximum context length (2048)."},
            ContextOverflow(3031, 2048),
        ),
        (
            {"message": "The decoder prompt (length 3031) is longer than the maximum model length of 2048. Make …"},
            ContextOverflow(3031, 2048),
        ),
        (
            {"message": "no room", "code": "context_length_exceeded"},
            InvalidRequest("no room", code="context_length_exceeded"),
        ),
    ],
)
def test_overflow_messages_of_many_servers_are_recognised(fields: dict[str, Any], expected: ModelyardError) -> None:
    assert read_http_error(400, {}, msgspec.json.encode({"error": fields})) == expected


def test_retry_after_and_queue_position_become_headers() -> None:
    written = write_http_error(Overloaded("full", retry_after=0.2, position=4), "trace-1")
    assert written.headers == {"x-request-id": "trace-1", "retry-after": "1", "x-queue-position": "4"}
    assert msgspec.json.decode(written.body)["error"]["queue_position"] == 4


@pytest.mark.parametrize("status", [400, 404, 418, 429, 500, 502, 503, 529])
def test_any_upstream_body_becomes_an_error_with_a_message(status: int) -> None:
    for body in (b"", b"<html>", b"[]", b"{}", b'{"error":null}', b'{"error":"x"}', b"\xff", b"[" * 9999):
        error = read_http_error(status, {"retry-after": "nan"}, body)
        assert error.message
        assert error.kind in STATUS


def test_an_error_outside_an_error_field_is_read_too() -> None:
    assert read_http_error(404, {}, b'{"message":"no such model"}').message == "no such model"


def test_an_error_in_a_chunk_is_classified_by_code_or_type() -> None:
    assert read_error_field({"message": "x", "code": 404}) == errors.NotFound("x")
    assert read_error_field({"message": "x", "type": "rate_limit_error"}).kind == "rate_limited"
    assert read_error_field(
        {"message": "x", "code": "engine_unavailable", "type": "server_error"}
    ) == errors.Unavailable("x")
    assert read_error_field("plain words").message == "plain words"
    assert read_error_field({}).kind == "internal"
