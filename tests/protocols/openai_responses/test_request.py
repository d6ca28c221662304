from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import (
    Audio,
    Constraint,
    Document,
    Image,
    ItemReference,
    Message,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from modelyard.protocols import openai_responses
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.openai_responses.reply import write_tool_choice, write_tools
from modelyard.protocols.openai_responses.request import read_tool_choice, read_tools


def read(headers: dict[str, str] | None = None, **fields: Any) -> Request:
    body = {"model": "tiny", "input": "hello"} | fields
    return openai_responses.read_request(msgspec.json.encode(body), headers or {})


def test_a_string_is_one_user_message() -> None:
    assert read() == Request(model="tiny", messages=(Message("user", (Text("hello"),)),))


def test_instructions_become_the_leading_system_message() -> None:
    request = read(instructions="Be brief.")
    assert request.messages[0] == Message("system", (Text("Be brief."),))
    assert request.instructions


def test_a_system_item_is_not_read_as_instructions() -> None:
    request = read(input=[{"role": "system", "content": "Be brief."}])
    assert request.messages[0].role == "system"
    assert not request.instructions


def test_unknown_fields_and_null_fields_are_accepted() -> None:
    assert read(client_metadata={"a": 1}, temperature=None, tools=None) == read()
    assert read(truncation="auto").warnings == ("field_ignored:truncation",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": 7}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"text": "x"}]}, "input[0]"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="user, assistant, system, developer"):
        read(input=[{"role": "wizard", "content": "x"}])


def test_a_wrong_type_is_reported_with_its_path() -> None:
    with pytest.raises(InvalidRequest, match="max_output_tokens"):
        read(max_output_tokens="many")


def test_a_background_response_is_marked() -> None:
    assert (read(background=True).background, read(background=False).background) == (True, False)


def test_a_previous_response_needs_no_input() -> None:
    assert read(input=None, previous_response_id="resp_1").previous == "resp_1"


def test_an_input_of_items_that_are_all_ignored_is_refused() -> None:
    ignored = {"type": "from_the_future"}
    with pytest.raises(InvalidRequest, match=r"item_ignored:from_the_future at input\[0\]") as error:
        read(input=[ignored], instructions="Be brief.")
    assert error.value.param == "input"
    assert len(read(input=[ignored, {"role": "user", "content": "hi"}]).messages) == 1
    assert read(input=[ignored], previous_response_id="resp_1").messages == ()


def test_structured_output_becomes_a_constraint() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "title", "schema": schema, "strict": True}, "verbosity": "low"}
    assert read(text=text).constraint == Constraint("json_schema", '{"type":"object"}', "title", None, True)
    assert read(text={"format": {"type": "json_object"}}).constraint == Constraint("json_object")
    assert read(text={"format": {"type": "text"}}, regex="a+").constraint == Constraint("regex", "a+")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'hologram' is unknown") as caught:
        read(text={"format": {"type": "hologram"}})
    assert caught.value.param == "text.format.type"


def test_reasoning_settings_are_read() -> None:
    assert read(reasoning={"effort": "high", "summary": "auto"}).reasoning == Reasoning(effort="high", summary="auto")
    assert read(reasoning={"effort": "none"}).reasoning.enabled is False
    assert read(reasoning={"generate_summary": "concise"}).reasoning.summary == "concise"


def test_include_turns_on_logprobs_and_encrypted_reasoning() -> None:
    request = read(include=["reasoning.encrypted_content", "message.output_text.logprobs"], top_logprobs=3)
    assert (request.encrypted_reasoning, request.logprobs) == (True, 3)
    assert read(include=["message.output_text.logprobs"]).logprobs == 0
    assert read(top_logprobs=3).logprobs is None


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, "cache-key"),
        ({"x-session-affinity": "d"}, "d"),
        ({"x-session-id": "c", "x-session-affinity": "d"}, "c"),
        ({"session-id": "b", "x-session-id": "c"}, "b"),
        ({"session-id": "b", "thread-id": "a"}, "a"),
    ],
)
def test_the_session_comes_from_headers_before_the_cache_key(headers: dict[str, str], session: str) -> None:
    assert read(headers, prompt_cache_key="cache-key").session == session


def test_extension_fields_and_identity_fields_are_read() -> None:
    request = read(
        top_k=5, seed=7, stop="END", priority="background", lora_adapter="l", metadata={"a": "b"}, store=False,
        safety_identifier="u", parallel_tool_calls=False, max_output_tokens=9, stream=True,
    )  # fmt: skip
    assert (request.sampling.top_k, request.sampling.seed, request.stop) == (5, 7, ("END",))
    assert (request.priority, request.lora_adapter, request.metadata) == ("background", "l", {"a": "b"})
    assert (request.store, request.user, request.parallel_tool_calls) == (False, "u", False)
    assert (request.max_tokens, request.stream) == (9, True)


def test_a_stored_prompt_is_refused_by_its_name() -> None:
    with pytest.raises(Unsupported, match=r"^prompt: .* not stored here") as caught:
        read(prompt={"id": "p"})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_is_named_by_its_id(conversation: Any) -> None:
    request = read(conversation=conversation, input=None)
    assert (request.conversation, request.messages) == ("conv_1", ())
    assert (read().conversation, read(conversation="").conversation) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b'{"model":"m","input":NaN}',
        b'{"model":"m","input":"\\ud800"}',
        b'{"model":"m","input":"\xff"}',
        b'{"model":"m","metadata":' + b'{"a":' * 10_000,
        b'{"model":"m","input":' + b"[" * 10_000,
        b'{"model":"m","input":[3]}',
        b'{"model":"m","input":"x","tools":[3]}',
        b'{"model":"m","input":"x","tools":[{"type":["function"]}]}',
        b"[]",
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        openai_responses.read_request(body, {})


def test_malformed_allowed_tools_match_nothing() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["x"]}, 3]}
    assert read(tools=[{"type": "function", "name": "f"}], tool_choice=choice).tools == ()


def test_very_many_items_and_tools_are_read() -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(10_000)]
    tools = [{"type": "function", "name": f"t{i}"} for i in range(10_000)]
    request = read(input=calls, tools=tools)
    assert (len(request.messages[0].parts), len(request.tools)) == (10_000, 10_000)


def read_items(*items: dict[str, Any]) -> Request:
    return openai_responses.read_request(msgspec.json.encode({"model": "tiny", "input": items}), {})


def call(id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_9", "call_id": id, "name": "shell", "arguments": "{}"} | more


def test_one_turn_of_the_model_is_one_message_with_parts_in_order() -> None:
    request = read_items(
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


def test_system_and_developer_messages_keep_their_position() -> None:
    request = read_items(
        *({"role": role, "content": role} for role in ("developer", "user", "system", "user", "developer"))
    )
    assert [message.role for message in request.messages] == ["developer", "user", "system", "user", "developer"]


def test_user_messages_in_a_row_are_not_joined() -> None:
    assert len(read_items({"role": "user", "content": "a"}, {"role": "user", "content": "b"}).messages) == 2


def test_our_signature_recovers_reasoning_that_the_client_dropped() -> None:
    signature = pack_reasoning("all of the reasoning")
    request = read_items({"type": "reasoning", "summary": [], "content": None, "encrypted_content": signature})
    assert request.messages[0].parts == (Thinking("all of the reasoning", signature),)


def test_foreign_reasoning_is_carried_but_not_read() -> None:
    request = read_items({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"})
    assert request.messages[0].parts == (Thinking("", "gAAAA", redacted=True),)


def test_a_summary_replaces_missing_reasoning() -> None:
    parts = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    assert read_items({"type": "reasoning", "summary": parts}).messages[0].parts == (Thinking("a\n\nb"),)


def test_images_are_read_in_messages_and_in_outputs() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    chat_style = {"type": "input_image", "image_url": {"url": "http://x/y.png", "detail": "low"}}
    request = read_items(
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
    request = read_items(
        {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    )
    assert request.messages[0].parts == (ToolCall("call_1", "apply_patch", "*** Begin", custom=True),)
    assert request.messages[1].parts == (ToolResult("call_1", (Text("done"),), custom=True),)


def test_broken_arguments_are_kept_unchanged() -> None:
    assert read_items(call("call_1", arguments='{"a":')).messages[0].parts == (ToolCall("call_1", "shell", '{"a":'),)


def test_a_refusal_is_text() -> None:
    request = read_items({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})
    assert request.messages[0].parts == (Text("no"),)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"]},
        {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0KGgo=", "action": "edit"},
    ],
)
def test_unknown_items_are_warnings(item: dict[str, Any]) -> None:
    request = read_items({"role": "user", "content": "a"}, item)
    assert len(request.messages) == 1
    assert item["type"] in request.warnings[0]
    assert "input[1]" in request.warnings[0]


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
def test_a_reference_to_an_item_joins_the_turn_around_it(item: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    request = read_items({"role": "user", "content": "a"}, item, call)
    assert request.has_references
    assert request.messages[1].parts == (ItemReference("msg_1"), ToolCall("c", "f", "{}"))


def test_a_reference_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_items({"type": "item_reference"})
    assert caught.value.param == "input[0].id"


@pytest.mark.parametrize(
    ("part", "param"),
    [({"type": "input_video"}, "type"), ({"type": "input_image"}, "image_url")],
)
def test_content_that_no_model_reads_is_refused_by_its_path(part: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_items({"role": "user", "content": [{"type": "input_text", "text": "a"}, part]})
    assert (caught.value.param, caught.value.code) == (f"input[0].content[1].{param}", "modality_unsupported")


def test_audio_and_files_are_read() -> None:
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,CCCC"},
        {"type": "input_file", "file_url": "https://example.com/a.pdf"},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_image", "file_id": "file-2", "detail": "low"},
    ]
    assert read_items({"role": "user", "content": parts}).messages[0].parts == (
        Audio("data:audio/mpeg;base64,AAAA"),
        Document("data:application/pdf;base64,CCCC", "a.pdf"),
        Document("https://example.com/a.pdf"),
        Document("file-id:file-1"),
        Image("file-id:file-2", "low"),
    )


@pytest.mark.parametrize(("kind", "field"), [("input_file", "file_data"), ("input_audio", "input_audio.data")])
def test_audio_or_a_file_without_data_is_refused_by_its_field(kind: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_items({"role": "user", "content": [{"type": kind}]})
    assert caught.value.param == f"input[0].content[0].{field}"


def test_in_an_output_the_model_is_told_of_a_part_that_it_cannot_read() -> None:
    output = [{"type": "input_file"}]
    request = read_items({"type": "function_call_output", "call_id": "c", "output": output})
    assert request.messages[0].parts == (ToolResult("c", (Text("[a part that this model does not read]"),)),)


@pytest.mark.parametrize("field", ["call_id", "name"])
def test_a_call_without_id_or_name_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        read_items(call("call_1") | {field: None})


SHELL = {"type": "function", "name": "shell", "description": "d", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "",
    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [SHELL | {"name": "spawn"}]}
SEARCH = {"type": "web_search", "external_web_access": True}


def test_every_kind_of_tool_is_read() -> None:
    assert read_tools([SHELL, PATCH, AGENTS, SEARCH]) == (
        Tool("shell", "d", {"type": "object"}, strict=False),
        Tool("patch", kind="custom", grammar={"syntax": "lark", "definition": "x"}),
        Tool("spawn", "d", {"type": "object"}, strict=False, namespace="agents"),
        Tool("web_search", parameters={"external_web_access": True}, kind="server", type="web_search"),
    )


def test_tools_that_were_read_are_written_back_unchanged() -> None:
    tools: list[dict[str, Any]] = [SHELL, PATCH, AGENTS, SEARCH]
    assert write_tools(read_tools(tools)) == tools


def test_a_deferred_tool_stays_deferred() -> None:
    tools = read_tools([SHELL | {"defer_loading": True}])
    assert tools[0].deferred
    assert write_tools(tools)[0]["defer_loading"] is True


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function", "function": {"name": "chat_style"}}, "tools[0]"),
        ({"type": "function", "name": "x", "parameters": "y"}, "tools[0].parameters"),
        ({"type": "function", "name": 3}, "tools[0].name"),
        ({"type": "namespace", "name": "x"}, "tools[0].tools"),
        ({"type": "namespace", "name": "x", "tools": [AGENTS]}, "tools[0].tools[0]"),
    ],
)
def test_an_invalid_tool_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools([tool])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "shell"}, ToolChoice("named", "shell")),
        ({"type": "custom", "name": "patch"}, ToolChoice("named", "patch")),
    ],
)
def test_choices_are_read_and_written(body: str | dict[str, Any] | None, choice: ToolChoice) -> None:
    tools, warnings = read_tools([SHELL, PATCH]), list[str]()
    assert read_tool_choice(body, tools, warnings) == (choice, tools)
    assert write_tool_choice(choice, tools) == (body or "auto")
    assert warnings == []


def test_allowed_tools_drop_every_other_tool() -> None:
    body = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}
    choice, tools = read_tool_choice(body, read_tools([SHELL, PATCH]), [])
    assert choice == ToolChoice("required")
    assert [tool.name for tool in tools] == ["shell"]


@pytest.mark.parametrize("body", ["sometimes", {"type": "web_search"}])
def test_an_unknown_choice_is_auto_with_a_warning(body: str | dict[str, Any]) -> None:
    warnings: list[str] = []
    assert read_tool_choice(body, (), warnings) == (ToolChoice(), ())
    assert len(warnings) == 1
