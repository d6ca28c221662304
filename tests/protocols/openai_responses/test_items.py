from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Request, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols import openai_responses as wire
from modelyard.protocols.common.reasoning_signature import pack_reasoning


def read(*items: dict[str, Any]) -> Request:
    return wire.read_request(msgspec.json.encode({"model": "tiny", "input": items}), {})


def call(id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_9", "call_id": id, "name": "shell", "arguments": "{}"} | more


def test_one_turn_of_the_model_is_one_message_with_parts_in_order() -> None:
    request = read(
        {"role": "user", "content": "list"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        call("call_1"),
        call("call_2", namespace="agents"),
        {"type": "function_call_output", "call_id": "call_1", "output": "a"},
        {"type": "function_call_output", "call_id": "call_2", "output": "b"},
        {"role": "user", "content": "thanks"},
    )
    assert request.messages == (
        Message("user", (Text("list"),)),
        Message(
            "assistant",
            (
                Thinking("hm"),
                Text("ok"),
                ToolCall("call_1", "shell", "{}"),
                ToolCall("call_2", "shell", "{}", "agents"),
            ),
        ),
        Message("tool", (ToolResult("call_1", (Text("a"),)), ToolResult("call_2", (Text("b"),)))),
        Message("user", (Text("thanks"),)),
    )


def test_system_and_developer_messages_stay_where_they_stand() -> None:
    request = read(*({"role": role, "content": role} for role in ("developer", "user", "system", "user", "developer")))
    assert [message.role for message in request.messages] == ["developer", "user", "system", "user", "developer"]


def test_user_messages_in_a_row_are_not_joined() -> None:
    assert len(read({"role": "user", "content": "a"}, {"role": "user", "content": "b"}).messages) == 2


def test_our_own_seal_recovers_reasoning_that_the_client_left_out() -> None:
    sealed = pack_reasoning("the whole thought")
    request = read({"type": "reasoning", "summary": [], "content": None, "encrypted_content": sealed})
    assert request.messages[0].parts == (Thinking("the whole thought", sealed),)


def test_foreign_reasoning_is_carried_but_not_read() -> None:
    request = read({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"})
    assert request.messages[0].parts == (Thinking("", "gAAAA", redacted=True),)


def test_a_summary_stands_in_for_reasoning_that_was_not_given() -> None:
    parts = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    assert read({"type": "reasoning", "summary": parts}).messages[0].parts == (Thinking("a\n\nb"),)


def test_images_are_read_in_messages_and_in_outputs() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    chat_style = {"type": "input_image", "image_url": {"url": "http://x/y.png", "detail": "low"}}
    request = read(
        {"role": "user", "content": [picture, chat_style]},
        call("call_1"),
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "see"}, picture],
        },
    )
    image = Image("data:image/png;base64,AA==", "high")
    assert request.messages[0].parts == (image, Image("http://x/y.png", "low"))
    assert request.messages[2].parts == (ToolResult("call_1", (Text("see"), image)),)


def test_custom_calls_carry_free_text() -> None:
    request = read(
        {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    )
    assert request.messages[0].parts == (ToolCall("call_1", "apply_patch", "*** Begin", custom=True),)
    assert request.messages[1].parts == (ToolResult("call_1", (Text("done"),), custom=True),)


def test_broken_arguments_come_through_as_they_stand() -> None:
    assert read(call("call_1", arguments='{"a":')).messages[0].parts == (ToolCall("call_1", "shell", '{"a":'),)


def test_a_refusal_is_text() -> None:
    request = read({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})
    assert request.messages[0].parts == (Text("no"),)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}},
        {"type": "tool_search_call", "arguments": {"query": "x"}, "call_id": None},
        {"type": "computer_call_output", "output": {"type": "computer_screenshot"}},
    ],
)
def test_unknown_items_are_warnings(item: dict[str, Any]) -> None:
    request = read({"role": "user", "content": "a"}, item)
    assert len(request.messages) == 1
    assert item["type"] in request.warnings[0]
    assert "input[1]" in request.warnings[0]


def test_unknown_content_is_a_warning_with_its_place() -> None:
    content = [{"type": "input_file", "file_id": "f"}, {"type": "input_image", "file_id": "f"}]
    request = read({"role": "user", "content": content})
    assert request.messages == (Message("user", ()),)
    assert [warning.split(":")[0] for warning in request.warnings] == ["input[0].content[0]", "input[0].content[1]"]


@pytest.mark.parametrize("field", ["call_id", "name"])
def test_a_call_without_id_or_name_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        read(call("call_1") | {field: None})
