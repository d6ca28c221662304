from __future__ import annotations

import msgspec
import pytest

from modelyard.core.errors import (
    ContextOverflow,
    Forbidden,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    OutputOverflow,
    Overloaded,
    RateLimited,
    Timeout,
)
from modelyard.protocols import openai_responses
from modelyard.protocols.openai_responses.errors import OVERFLOW, read_failure, write_failure
from tests.protocols.golden import check_golden
from tests.protocols.openai_responses.helpers import CODEX, TRACE, data_of


def test_a_streamed_overflow_is_a_failed_response() -> None:
    written = openai_responses.write_error(ContextOverflow(40123, 32768), trace=TRACE, streaming=True, request=CODEX)
    assert (written.status, written.content_type) == (200, "text/event-stream")
    assert [data["type"] for data in data_of(written.body)] == ["response.created", "response.failed"]
    assert data_of(written.body)[1]["response"]["error"]["message"].startswith(OVERFLOW)
    check_golden("openai_responses", "overflow.sse", written.body)


def test_an_overflow_without_a_stream_has_chats_error_body() -> None:
    written = openai_responses.write_error(
        ContextOverflow(40123, 32768), trace=TRACE, request=msgspec.structs.replace(CODEX, tools=())
    )
    error = msgspec.json.decode(written.body)["error"]
    assert written.status == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (40123, 32768)
    check_golden("openai_responses", "overflow.json", written.body)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_full_queue_is_503_with_retry_after(streaming: bool) -> None:
    written = openai_responses.write_error(
        Overloaded("full", retry_after=3, position=7), trace=TRACE, streaming=streaming
    )
    assert written.status == 503
    assert (written.headers["retry-after"], written.headers["x-queue-position"]) == ("3", "7")
    assert msgspec.json.decode(written.body)["error"]["code"] == "server_is_overloaded"


def test_an_output_overflow_is_400_even_on_a_stream() -> None:
    assert openai_responses.write_error(OutputOverflow(10, 20, 16), trace=TRACE, streaming=True).status == 400


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad", param="input", code="c"),
        NotFound("no such model"),
        Overloaded("full", retry_after=2.0, position=3),
        ContextOverflow(9, 8),
    ],
)
def test_an_error_that_we_wrote_reads_back_equal(error: InvalidRequest) -> None:
    written = openai_responses.write_error(error, trace=TRACE)
    assert openai_responses.read_error(written.status, written.headers, written.body) == error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x"), "invalid_prompt"),
        (InvalidRequest("x", code="invalid_image"), "invalid_image"),
        (Forbidden("x", code="remote_not_allowed"), "remote_not_allowed"),
        (Overloaded("x"), "server_is_overloaded"),
        (Timeout("x"), "server_error"),
        (Internal("x", id="i"), "server_error"),
    ],
)
def test_each_error_has_its_code(error: ModelyardError, code: str) -> None:
    assert write_failure(error) == {"code": code, "message": "x"}


def test_the_delay_of_a_rate_limit_reads_back() -> None:
    error = RateLimited("Too many requests.", retry_after=1.5)
    assert read_failure(write_failure(error)) == error


def test_a_delay_in_the_middle_of_a_message_is_found() -> None:
    failure = {"code": "rate_limit_exceeded", "message": "Limit reached. Please try again in 11.054s. See the docs."}
    error = read_failure(failure)
    assert (error.retry_after, error.message) == (11.054, failure["message"])


@pytest.mark.parametrize("failure", [None, {}, "broken", {"message": None}])
def test_a_failure_without_a_message_gets_one(failure: object) -> None:
    assert read_failure(failure).message


@pytest.mark.parametrize(("code", "kind"), [("forbidden", Forbidden), ("image_too_large", InvalidRequest)])
def test_the_code_determines_the_error_class(code: str, kind: type) -> None:
    assert type(read_failure({"code": code, "message": "m"})) is kind
