"""Errors have the form of the protocol whose path was called."""

from __future__ import annotations

import json
import logging

import pytest

from modelyard.core.errors import ContextOverflow, Internal, NotFound
from modelyard.http.errors import as_modelyard_error, protocol_of, write_error
from modelyard.http.request_context import RequestContext
from tests.http.app_client import row_of

OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/completion", "/infill")


@pytest.mark.parametrize(
    ("path", "headers", "name"),
    [
        ("/v1/messages", {}, "anthropic_messages"),
        ("/v1/messages/count_tokens", {}, "anthropic_messages"),
        ("/v1/messages/nonsense", {}, "anthropic_messages"),
        ("/v1/models", {"anthropic-version": "2023-06-01"}, "anthropic_messages"),
        ("/v1/models", {}, "openai_chat"),
        ("/v1/responses", {}, "openai_responses"),
        ("/v1/responses/resp_1", {}, "openai_responses"),
        ("/v1/responses/resp_1", {"anthropic-version": "2023-06-01"}, "openai_responses"),
        ("/responses", {}, "openai_responses"),
        ("/v1/chat/completions", {}, "openai_chat"),
        *((path, {"anthropic-version": "2023-06-01"}, "openai_chat") for path in OPENAI_PATHS),
        ("/nonsense", {"anthropic-version": "2023-06-01"}, "anthropic_messages"),
        ("/v1/completions", {}, "openai_chat"),
        ("/v1/embeddings", {}, "openai_chat"),
        ("/tokenize", {}, "openai_chat"),
        ("/", {}, "openai_chat"),
        ("/nonsense", {}, "openai_chat"),
    ],
)
def test_path_and_version_header_select_the_protocol(path: str, headers: dict[str, str], name: str) -> None:
    assert name == protocol_of(RequestContext("t", path, headers, row_of(path))).NAME


def test_the_same_error_in_two_protocols() -> None:
    error = NotFound("no such model", code="model_not_found")
    anthropic, openai = (
        write_error(error, RequestContext("t", path, {}, row_of(path))) for path in ("/v1/messages", "/v1/completions")
    )
    assert anthropic.status == openai.status == 404
    body = json.loads(anthropic.body)
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "not_found_error", "req_t")
    assert json.loads(openai.body)["error"]["code"] == "model_not_found"


def test_an_overflow_names_the_field_of_its_protocol() -> None:
    params = [
        json.loads(write_error(ContextOverflow(9, 8), RequestContext("t", path, {}, row_of(path))).body)["error"][
            "param"
        ]
        for path in ("/v1/chat/completions", "/v1/responses")
    ]
    assert params == ["messages", "input"]


def test_our_own_errors_are_unchanged() -> None:
    error = NotFound("x")
    assert as_modelyard_error(error) is error


def test_an_unexpected_error_is_logged_with_an_id_and_reported_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        error = as_modelyard_error(ZeroDivisionError("the secret plan"))
    assert isinstance(error, Internal)
    assert "secret" not in error.message
    assert error.id in error.message
    assert caplog.records[-1].exc_info is not None
    assert "secret plan" in str(caplog.records[-1].exc_info[1])
