from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Request, Text, Thinking, ToolCall, ToolReference, ToolResult
from tests.protocols.openai_chat.bodies import read, written


def messages(*bodies: dict[str, Any]) -> tuple[Message, ...]:
    return read(messages=list(bodies)).messages


def test_every_role_stays_where_it_stands() -> None:
    roles = ["system", "user", "developer", "user", "assistant", "system"]
    assert [m.role for m in messages(*({"role": role, "content": "x"} for role in roles))] == roles


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'robot'.*system, developer, user, assistant, tool, function") as caught:
        messages({"role": "user", "content": "x"}, {"role": "robot", "content": "x"})
    assert caught.value.param == "messages[1].role"


def test_a_string_equals_one_text_part() -> None:
    part = {"type": "text", "text": "hi"}
    assert messages({"role": "user", "content": "hi"}) == messages({"role": "user", "content": [part]})
    assert messages({"role": "user", "content": ["hi"]}) == (Message("user", (Text("hi"),)),)


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_no_part(content: object) -> None:
    assert messages({"role": "user", "content": content}) == (Message("user"),)


def test_images_are_read_in_every_spelling() -> None:
    url = "data:image/png;base64,AA=="
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "high"},
    ]
    found = messages({"role": "user", "content": parts})[0].parts
    assert found == (Image(url, "low"), Image(url), Image(url, "high"))


def test_an_image_without_a_url_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs a url") as caught:
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})
    assert caught.value.param == "messages[0].content[0].image_url"


def test_a_text_part_without_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        messages({"role": "user", "content": [{"type": "text", "text": 5}]})


def test_parts_of_unknown_type_are_dropped_with_a_warning() -> None:
    parts = [{"type": "input_audio", "input_audio": {}}, {"type": "text", "text": "hi"}, {"type": "x", "text": {}}]
    request = read(messages=[{"role": "user", "content": parts}])
    assert request.messages[0].parts == (Text("hi"),)
    assert request.warnings[0] == "content_part_dropped: messages[0].content[0] is of type 'input_audio'"
    assert len(request.warnings) == 2


def test_a_refusal_is_text() -> None:
    part = {"type": "refusal", "refusal": "no"}
    assert messages({"role": "assistant", "content": [part]})[0].parts == (Text("no"),)
    assert messages({"role": "assistant", "content": None, "refusal": "no"})[0].parts == (Text("no"),)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_first(field: str) -> None:
    found = messages({"role": "assistant", "content": "hi", field: "hmm"})[0]
    assert found.parts == (Thinking("hmm"), Text("hi"))


def test_calls_keep_their_arguments_as_they_were_written() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 5000.0}'}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": "not JSON"}},
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "d", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
    ]
    assert messages({"role": "assistant", "content": None, "tool_calls": calls})[0].parts == (
        ToolCall("a", "f", '{"x": 5000.0}'),
        ToolCall("b", "f", "not JSON"),
        ToolCall("c", "f", '{"x":1}'),
        ToolCall("d", "patch", "*** Begin", custom=True),
    )


def test_a_call_without_its_function_is_refused_and_one_of_unknown_type_dropped() -> None:
    with pytest.raises(InvalidRequest, match="function is required"):
        messages({"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]})
    request = read(messages=[{"role": "assistant", "tool_calls": [{"id": "a", "type": "mcp"}]}])
    assert request.messages[0].parts == ()
    assert "'mcp'" in request.warnings[0]


def test_neighbouring_tool_results_share_one_message() -> None:
    found = messages(
        {"role": "assistant", "tool_calls": [{"id": "b", "type": "custom", "custom": {"name": "p", "input": "x"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"role": "user", "content": "go on"},
        {"role": "tool", "tool_call_id": "c", "content": None},
    )
    assert [m.role for m in found] == ["assistant", "tool", "user", "tool"]
    assert found[1].parts == (ToolResult("a", (Text("1"),)), ToolResult("b", (Text("2"),), custom=True))
    assert found[3].parts == (ToolResult("c"),)


def test_a_tool_message_must_say_which_call_it_answers() -> None:
    with pytest.raises(InvalidRequest, match="names the call") as caught:
        messages({"role": "user", "content": "x"}, {"role": "tool", "content": "1"})
    assert caught.value.param == "messages[1].tool_call_id"


def test_old_function_calls_get_an_id_that_their_result_shares() -> None:
    found = messages(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    )
    assert found[1].parts == (ToolCall("call_1", "f", "{}"),)
    assert found[2] == Message("tool", (ToolResult("call_1", (Text("1"),)),))


def test_names_of_speakers_survive_both_ways() -> None:
    request = read(messages=[{"role": "user", "content": "x", "name": "ann"}])
    assert request.messages[0].name == "ann"
    assert written(request)["messages"][0]["name"] == "ann"


def test_a_discovered_tool_is_told_in_words() -> None:
    request = Request(model="m", messages=(Message("tool", (ToolResult("a", (ToolReference("Grep"),)),)),))
    content = written(request)["messages"][0]["content"]
    assert content == "The tool Grep is now available."
