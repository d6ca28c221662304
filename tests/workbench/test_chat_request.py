"""The request of a chat in each protocol, and as code."""

from __future__ import annotations

import json
import shlex

import pytest

from modelyard.core.chat import Chat, Turn
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Part, Text, ToolCall, ToolResult
from modelyard.http.errors import load_protocol
from modelyard.workbench.chat_request import (
    PROTOCOLS,
    chat_request,
    curl_snippet,
    format_body,
    python_snippet,
    read_tools,
)

CHAT = load_protocol("openai_chat")


def chat(*parts: Part) -> Chat:
    made = Chat()
    made.settings.system = "Be brief."
    made.add(Turn(role="user", parts=parts or (Text("Hello, it's me"),)))
    return made


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_reads_back_the_request(name: str) -> None:
    made, protocol = chat(), load_protocol(name)
    made.settings.temperature, made.settings.max_tokens = 0.5, 7
    read = protocol.read_request(protocol.write_request(chat_request(made, "m")), {})
    assert (read.model, read.stream, read.max_tokens, read.sampling.temperature) == ("m", True, 7, 0.5)
    assert [part.text for message in read.messages for part in message.parts] == ["Be brief.", "Hello, it's me"]  # type: ignore[union-attr]


def test_the_message_that_is_being_typed_can_be_counted() -> None:
    request = chat_request(chat(), "m", draft=(Text("and you"),))
    assert request.messages[-1].parts == (Text("and you"),)


def test_tool_results_refer_to_their_calls() -> None:
    made = chat()
    answer = made.add(Turn(parent=made.head, role="assistant", parts=(ToolCall("c1", "weather", "{}"),)))
    made.add(Turn(parent=answer.id, role="tool", parts=(ToolResult("c1", (Text("sunny"),)),)))
    body = json.loads(CHAT.write_request(chat_request(made, "m")))
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def test_tools_are_read_in_the_format_of_any_protocol() -> None:
    for text in (
        '[{"name": "f", "parameters": {"type": "object"}}]',
        '[{"name": "f", "input_schema": {"type": "object"}}]',
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}',
    ):
        (tool,) = read_tools(text)
        assert (tool.name, tool.parameters) == ("f", {"type": "object"})
    assert read_tools("  ") == ()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"description": "no name"}]', '[{"name": "f", "parameters": 3}]'])
def test_invalid_tools_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tool|parameters"):
        read_tools(text)


def test_images_are_shortened_in_the_shown_body() -> None:
    made = chat(Image("data:image/png;base64," + "A" * 5000), Text("look"))
    shown = format_body(CHAT.write_request(chat_request(made, "m")))
    assert len(shown) < 1000
    assert "(5022 characters)" in shown


def test_the_curl_snippet_has_the_exact_body_and_no_key() -> None:
    body = CHAT.write_request(chat_request(chat(), "m"))
    words = shlex.split(curl_snippet("http://x", "/v1/chat/completions", body, needs_key=True))
    assert words[words.index("-d") + 1].encode() == body
    assert "authorization: Bearer $MODELYARD_API_KEY" in words


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_python_snippet_compiles_and_has_the_exact_body(needs_key: bool) -> None:
    body = CHAT.write_request(chat_request(chat(), "m"))
    code = python_snippet("http://x", "/v1/chat/completions", body, needs_key)
    compile(code, "snippet", "exec")
    head = code.partition("with httpx")[0].replace("import httpx", "").replace("headers = ", "pass; headers = lambda: ")
    namespace: dict[str, object] = {}
    exec(head, namespace)  # everything before the request
    assert namespace["body"] == json.loads(body)
    assert ("os" in namespace) == needs_key
