"""The hint for a client whose own prompt exceeds the window; none if its conversation does."""

from __future__ import annotations

import pytest

from modelyard.core.errors import ContextOverflow, InvalidRequest, ModelyardError
from modelyard.core.request import Message, Request, Text, Tool, ToolCall
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.protocols.common.errors import overflow_hint

OVERFLOW = ContextOverflow(10_000, 4096)
TOOLS = (Tool("read", "Reads a file. " * 100, {"type": "object"}),)


def request(*messages: Message, tools: tuple[Tool, ...] = TOOLS) -> Request:
    system = Message("system", (Text("You are an agent. " * 100),))
    return Request(model="m", messages=(system, *messages), tools=tools)


HELLO = Message("user", (Text("hello"),))
NEW_CONVERSATION = request(HELLO)


def test_the_hint_has_the_size_of_the_clients_own_prompt_and_a_remedy() -> None:
    hint = overflow_hint(OVERFLOW, NEW_CONVERSATION, "take another")
    assert "about 9985 of them" in hint
    assert "larger n_ctx, or take another." in hint


@pytest.mark.parametrize(
    ("error", "request_"),
    [
        (OVERFLOW, None),
        (OVERFLOW, request(HELLO, tools=())),
        (OVERFLOW, request(Message("user", (Text("word " * 5000),)))),
        (OVERFLOW, request(HELLO, Message("assistant", (ToolCall("c", "read", "x" * 20_000),)))),
        (OVERFLOW, request(Message("user", (Text("word " * 800),)), tools=(Tool("s", "x" * 9999, kind="server"),))),
        (InvalidRequest("no"), NEW_CONVERSATION),
    ],
    ids=["no request", "no tools", "a long message", "a long history", "a server tool", "another error"],
)
def test_there_is_no_hint_if_the_conversation_is_too_long_or_the_error_is_another(
    error: ModelyardError, request_: Request | None
) -> None:
    assert overflow_hint(error, request_, "take another") == ""


def test_the_hint_for_claude_code_follows_the_message_that_it_matches() -> None:
    body = anthropic_messages.write_error(OVERFLOW, trace="t", request=NEW_CONVERSATION).body.decode()
    assert "prompt is too long: 10000 tokens > 4096 maximum. The client's own instructions" in body
    assert "modelyard launch claude -- --bare" in body


@pytest.mark.parametrize("protocol", [openai_chat, openai_responses])
def test_the_hint_for_other_clients_follows_openais_message(protocol: object) -> None:
    error = protocol.write_error(OVERFLOW, trace="t", request=NEW_CONVERSATION)  # type: ignore[attr-defined]
    assert b"reduce the length of the messages. The client's own instructions" in error.body
    assert protocol.read_error(error.status, {}, error.body) == OVERFLOW  # type: ignore[attr-defined]


def test_the_hint_for_a_codex_stream_follows_the_message_that_it_matches() -> None:
    error = openai_responses.write_error(OVERFLOW, trace="t", streaming=True, request=NEW_CONVERSATION)
    hint = b"adjust your input and try again. It has 10000 tokens, and the window 4096. The client's own instructions"
    assert (error.status, error.content_type) == (200, "text/event-stream")
    assert hint in error.body
    grown = request(Message("user", (Text("word " * 5000),)))
    plain = openai_responses.write_error(OVERFLOW, trace="t", streaming=True, request=grown)
    assert b'adjust your input and try again."' in plain.body
