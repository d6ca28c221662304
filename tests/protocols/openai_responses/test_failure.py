from __future__ import annotations

import pytest

from modelyard.core.errors import Forbidden, Internal, InvalidRequest, ModelyardError, Overloaded, RateLimited, Timeout
from modelyard.protocols.openai_responses.failure import read_failure, write_failure


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


def test_the_pause_of_a_rate_limit_survives() -> None:
    error = RateLimited("Too many requests.", retry_after=1.5)
    assert read_failure(write_failure(error)) == error


def test_a_pause_in_the_middle_of_a_sentence_is_found() -> None:
    told = {"code": "rate_limit_exceeded", "message": "Limit reached. Please try again in 11.054s. See the docs."}
    error = read_failure(told)
    assert (error.retry_after, error.message) == (11.054, told["message"])


@pytest.mark.parametrize("told", [None, {}, "broken", {"message": None}])
def test_a_failure_without_words_is_still_an_error(told: object) -> None:
    assert read_failure(told).message


@pytest.mark.parametrize(("code", "kind"), [("forbidden", Forbidden), ("image_too_large", InvalidRequest)])
def test_the_meaning_of_a_code_is_kept(code: str, kind: type) -> None:
    assert type(read_failure({"code": code, "message": "m"})) is kind
