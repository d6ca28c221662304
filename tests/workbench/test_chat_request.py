"""The playground's conversation: the requests in each protocol, what is kept of an answer, and code snippets."""

from __future__ import annotations

import json
import shlex

import pytest
from modelyard.workbench.conversation import (
    PROTOCOLS,
    PlaygroundConversation,
    curl_snippet,
    format_body,
    python_snippet,
    read_tools,
)

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Text, Thinking, ToolCall
from modelyard.http.errors import load_protocol

IMAGE = "data:image/png;base64,AAAA"
CHAT = load_protocol("openai_chat")


def conversation() -> PlaygroundConversation:
    made = PlaygroundConversation()
    made.settings.model, made.settings.system = "m", "Be brief."
    made.add_user_message("Hello, it's me")
    return made


def reply(*parts: Text | Thinking | ToolCall) -> Reply:
    return Reply(Started("t", "m", 0), tuple(map(Block, parts)), Finished("end", Usage()))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_reads_back_the_request(name: str) -> None:
    made, protocol = conversation(), load_protocol(name)
    made.settings.temperature, made.settings.max_tokens = 0.5, 7
    read = protocol.read_request(protocol.write_request(made.request()), {})
    assert (read.model, read.stream, read.max_tokens, read.sampling.temperature) == ("m", True, 7, 0.5)
    assert [part.text for message in read.messages for part in message.parts] == ["Be brief.", "Hello, it's me"]  # type: ignore[union-attr]


def test_images_are_sent_with_the_next_message_only() -> None:
    made = PlaygroundConversation()
    made.images.append(IMAGE)
    made.add_user_message("What is it?")
    made.add_user_message("Really?")
    assert [len(message.parts) for message in made.messages] == [2, 1]


def test_reasoning_is_not_sent_back() -> None:
    made = conversation()
    made.add_reply(reply(Thinking("hm"), Text("Hello.")))
    assert made.messages[-1].parts == (Text("Hello."),)


def test_a_stopped_answer_is_kept_and_an_unanswered_message_is_removed() -> None:
    made = conversation()
    made.add_partial_reply("Hel")
    assert made.messages[-1].parts == (Text("Hel"),)
    made.add_user_message("Go on")
    made.add_partial_reply("")
    assert made.messages[-1].parts == (Text("Hel"),)


def test_tool_results_refer_to_their_calls() -> None:
    made = conversation()
    made.add_reply(reply(ToolCall("c1", "weather", "{}")))
    made.add_tool_results({"c1": "sunny"})
    body = json.loads(CHAT.write_request(made.request()))
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
    made = PlaygroundConversation()
    made.images.append("data:image/png;base64," + "A" * 5000)
    made.add_user_message("look")
    shown = format_body(CHAT.write_request(made.request()))
    assert len(shown) < 1000
    assert "(5022 characters)" in shown


def test_the_curl_snippet_has_the_exact_body_and_no_key() -> None:
    body = CHAT.write_request(conversation().request())
    words = shlex.split(curl_snippet("http://x", "/v1/chat/completions", body, needs_key=True))
    assert words[words.index("-d") + 1].encode() == body
    assert "authorization: Bearer $MODELYARD_API_KEY" in words


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_python_snippet_compiles_and_has_the_exact_body(needs_key: bool) -> None:
    body = CHAT.write_request(conversation().request())
    code = python_snippet("http://x", "/v1/chat/completions", body, needs_key)
    compile(code, "snippet", "exec")
    head = code.partition("with httpx")[0].replace("import httpx", "").replace("headers = ", "pass; headers = lambda: ")
    namespace: dict[str, object] = {}
    exec(head, namespace)  # everything before the request
    assert namespace["body"] == json.loads(body)
    assert ("os" in namespace) == needs_key
