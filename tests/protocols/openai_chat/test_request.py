from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import (
    Audio,
    Constraint,
    Document,
    Image,
    Message,
    Reasoning,
    Request,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from modelyard.protocols import openai_chat
from tests.protocols.openai_chat.helpers import body, read, written
from tests.strategies import requests


def test_a_short_request_reads_as_its_defaults() -> None:
    assert read() == Request(model="m", messages=(Message("user", (Text("Hello"),)),))


def test_unknown_fields_are_accepted() -> None:
    request = read(verbosity="low", service_tier="auto", modalities=["text"], from_the_future=1)
    assert request == replace(read(), warnings=("field_ignored:service_tier", "field_ignored:verbosity"))


def test_nulls_mean_absence() -> None:
    names = ("temperature", "tools", "stop", "n", "stream", "logprobs", "response_format", "tool_choice", "metadata")
    assert read(**dict.fromkeys(names)) == read()


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert read(max_tokens=5).max_tokens == 5


def test_a_single_stop_string_and_a_list_read_alike() -> None:
    assert read(stop="END").stop == read(stop=["END"]).stop == ("END",)


def test_empty_stop_strings_are_dropped_with_a_warning() -> None:
    request = read(stop=["", "END"])
    assert request.stop == ("END",)
    assert request.warnings == ("empty_stop_string_dropped",)
    assert read(stop="").stop == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 3}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"top_logprobs": 2}, 2),
        ({"logprobs": 4}, 4),
        ({"logprobs": 0}, 0),
    ],
)
def test_logprobs_count_the_alternatives(fields: dict[str, object], expected: int | None) -> None:
    assert read(**fields).logprobs == expected


def test_streaming_and_its_usage_are_read() -> None:
    request = read(stream=True, stream_options={"include_usage": True})
    assert (request.stream, request.include_usage) == (True, True)
    assert (read().stream, read().include_usage) == (False, False)


def test_a_json_schema_keeps_its_text() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
    raw += b'"json_schema":{"name":"n","strict":true,"description":"d","schema":{"maximum": 1.50, "b": 1e2}}}}'
    constraint = openai_chat.read_request(raw, {}).constraint
    assert constraint == Constraint("json_schema", '{"maximum": 1.50, "b": 1e2}', "n", "d", True)


def test_response_formats_become_constraints() -> None:
    assert read(response_format={"type": "text"}).constraint is None
    assert read(response_format={"type": "json_object"}).constraint == Constraint("json_object")
    response_format = {"type": "json_object", "schema": {"type": "object"}}
    assert read(response_format=response_format).constraint == Constraint("json_schema", '{"type":"object"}')
    assert read(regex="a+").constraint == Constraint("regex", "a+")


@pytest.mark.parametrize("kind", ["yaml", "structural_tag"])
def test_an_unknown_response_format_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{kind}' is unknown; send one of text, json_object") as caught:
        read(response_format={"type": kind})
    assert caught.value.param == "response_format.type"


def test_a_response_format_beside_another_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="response_format and guided_regex constrain the same output"):
        read(response_format={"type": "json_object"}, guided_regex="a+")
    assert read(response_format={"type": "text"}, guided_regex="a+").constraint == Constraint("regex", "a+")


def test_spoken_answers_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        read(modalities=["text", "audio"], audio={"voice": "alloy"})
    assert caught.value.param == "modalities"


def test_the_session_comes_from_headers_before_the_cache_key() -> None:
    data = body(prompt_cache_key="key", user="ann")
    assert openai_chat.read_request(data, {}).session == "key"
    assert openai_chat.read_request(data, {"session-id": "c", "x-session-affinity": "b"}).session == "b"
    assert openai_chat.read_request(data, {"x-session-affinity": "b", "x-session-id": "a"}).session == "a"
    alone = openai_chat.read_request(body(user="ann"), {})
    assert (alone.session, alone.user) == (None, "ann")


def test_extension_fields_reach_the_sampling() -> None:
    assert read(top_k=5, seed=7, logit_bias={"12": -100}).sampling == Sampling(top_k=5, seed=7, logit_bias={12: -100.0})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": None}, "messages", "at least one message"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": 129}, "n", "between 1 and 128"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"top_logprobs": -1}, "top_logprobs", "between 0 and 20"),
        ({"logprobs": 50}, "logprobs", "between 0 and 20"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"stop": ["x"] * 129}, "stop", "at most 128"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"messages": "hi"}, "messages", "array"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "must be an object"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "names no tool"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"a":"\\ud800"}'])
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        openai_chat.read_request(raw, {})


def test_only_fields_that_are_set_are_written() -> None:
    assert written(read()) == {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def test_streaming_and_its_usage_are_written() -> None:
    out = written(read(stream=True, stream_options={"include_usage": True}))
    assert out["stream"] is True
    assert out["stream_options"] == {"include_usage": True}


def test_session_user_metadata_and_store_read_back_equal() -> None:
    request = read(prompt_cache_key="k", user="u", metadata={"a": "b"}, store=False)
    assert openai_chat.read_request(openai_chat.write_request(request), {}) == request


# --- both ways ------------------------------------------------------------------------------------------------------


def expressible(request: Request) -> Request:
    """The protocol orders reasoning, content and calls; a result has the kind of its call. Whoever sends `reasoning`
    gets it under that name too."""
    custom: set[str] = set()
    messages = []
    for message in request.messages:
        if message.role == "assistant":
            custom |= {p.id for p in message.parts if isinstance(p, ToolCall) and p.custom}
            messages.append(_in_order(message))
        elif message.role == "tool":
            results = [p for p in message.parts if isinstance(p, ToolResult)]
            messages.append(Message("tool", tuple(replace(r, custom=r.call_id in custom) for r in results)))
        else:
            messages.append(message)
    asked = request.reasoning
    both_names = asked.budget is not None or asked.visible is not None
    return replace(request, messages=tuple(messages), reasoning=replace(asked, both_names=both_names))


def _in_order(message: Message) -> Message:
    thinking = "".join(p.text for p in message.parts if isinstance(p, Thinking))
    content = [p for p in message.parts if not isinstance(p, Thinking | ToolCall)]
    calls = [p for p in message.parts if isinstance(p, ToolCall)]
    return Message("assistant", (*([Thinking(thinking)] if thinking else []), *content, *calls))


@settings(max_examples=100, deadline=None)
@given(
    requests(
        custom=True,
        broken=True,
        details=True,
        developer=True,
        images_in_results=True,
        logprobs=True,
        n=True,
        named_constraints=True,
    ).map(expressible)
)
def test_an_expressible_request_reads_back_equal(request: Request) -> None:
    assert openai_chat.read_request(openai_chat.write_request(request), {}) == request


@settings(max_examples=100, deadline=None)
@given(
    requests(
        custom=True,
        server=True,
        deferred=True,
        namespaces=True,
        redacted=True,
        broken=True,
        errors=True,
        references=True,
        images_in_results=True,
        logprobs=True,
        n=True,
    )
)
def test_writing_a_request_that_was_read_back_changes_nothing(request: Request) -> None:
    once = openai_chat.write_request(request)
    assert openai_chat.write_request(openai_chat.read_request(once, {})) == once


def messages(*bodies: dict[str, Any]) -> tuple[Message, ...]:
    return read(messages=list(bodies)).messages


def test_messages_of_every_role_keep_their_position() -> None:
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
def test_empty_content_has_no_part(content: object) -> None:
    assert messages({"role": "user", "content": content}) == (Message("user"),)


def test_images_are_read_in_every_form() -> None:
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


@pytest.mark.parametrize("kind", ["video_url", "x"])
@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_part_that_no_model_reads_is_refused_by_its_path(role: str, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"messages\\[0\\].content\\[1\\] is of type '{kind}'") as caught:
        read(messages=[{"role": role, "content": [{"type": "text", "text": "hi"}, {"type": kind, kind: {}}]}])
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1].type", "modality_unsupported")


def test_audio_and_files_are_read() -> None:
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/mpeg;base64,BBBB"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,CCCC"}},
        {"type": "file", "file": {"file_data": "DDDD"}},
    ]
    assert read(messages=[{"role": "user", "content": parts}]).messages[0].parts == (
        Audio("data:audio/wav;base64,AAAA"),
        Audio("data:audio/mpeg;base64,BBBB"),
        Document("data:application/pdf;base64,CCCC", "a.pdf"),
        Document("data:application/pdf;base64,DDDD"),
    )


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_audio", "input_audio": {}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "ogg"}}, "input_audio.format"),
        ({"type": "audio_url", "audio_url": "https://example.com/a.wav"}, "audio_url"),
        ({"type": "file", "file": {}}, "file.file_data"),
    ],
)
def test_audio_or_a_file_without_data_is_refused_by_its_field(part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == f"messages[0].content[0].{field}"


def test_in_a_tools_result_the_model_is_told_of_a_part_that_it_cannot_read() -> None:
    request = read(messages=[{"role": "tool", "tool_call_id": "a", "content": [{"type": "file", "file": {}}]}])
    assert request.messages[0].parts == (ToolResult("a", (Text("[file: this model does not read it]"),)),)
    assert request.warnings == ("content_part_replaced: messages[0].content[0] is of type 'file'",)


def test_unknown_parts_of_the_assistants_own_message_are_dropped_with_a_warning() -> None:
    parts = [{"type": "thinking_summary", "text": {}}, {"type": "text", "text": "hi"}]
    request = read(messages=[{"role": "assistant", "content": parts}])
    assert request.messages[0].parts == (Text("hi"),)
    assert request.warnings == ("content_part_dropped: messages[0].content[0] is of type 'thinking_summary'",)


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


def test_a_legacy_function_call_and_its_result_share_an_id() -> None:
    found = messages(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    )
    assert found[1].parts == (ToolCall("call_1", "f", "{}"),)
    assert found[2] == Message("tool", (ToolResult("call_1", (Text("1"),)),))


def test_the_name_of_a_message_is_read_and_written() -> None:
    request = read(messages=[{"role": "user", "content": "x", "name": "ann"}])
    assert request.messages[0].name == "ann"
    assert written(request)["messages"][0]["name"] == "ann"


def test_a_tool_reference_is_written_as_a_sentence() -> None:
    request = Request(model="m", messages=(Message("tool", (ToolResult("a", (ToolReference("Grep"),)),)),))
    content = written(request)["messages"][0]["content"]
    assert content == "The tool Grep is now available."


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}


def test_functions_are_read_nested_flat_and_legacy() -> None:
    expected = (Tool("f", "d", {"type": "object"}, strict=True),)
    assert read(tools=[{"type": "function", "function": FUNCTION}]).tools == expected
    assert read(tools=[{"type": "function", **FUNCTION}]).tools == expected
    assert read(functions=[FUNCTION]).tools == expected


def test_a_custom_tools_grammar_is_flat_inside_and_nested_on_the_wire() -> None:
    request = read(tools=[{"type": "custom", "custom": {"name": "p", "format": GRAMMAR}}])
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    assert request.tools == (Tool("p", kind="custom", grammar=grammar),)
    assert written(request)["tools"] == [{"type": "custom", "custom": {"name": "p", "format": GRAMMAR}}]


def test_tools_of_other_types_are_server_tools() -> None:
    request = read(tools=[{"type": "web_search", "filters": {}}])
    assert request.tools == (Tool("web_search", kind="server", type="web_search"),)
    assert "tools" not in written(request)


def test_tool_choices_are_read_in_every_form() -> None:
    assert read(tool_choice="none").tool_choice == ToolChoice("none")
    assert read(tool_choice="required").tool_choice == read(tool_choice="any").tool_choice == ToolChoice("required")
    named = ToolChoice("named", "f")
    assert read(tool_choice={"type": "function", "function": {"name": "f"}}).tool_choice == named
    assert read(tool_choice={"type": "function", "name": "f"}).tool_choice == named
    assert read(tool_choice={"type": "custom", "custom": {"name": "f"}}).tool_choice == named
    assert read(function_call={"name": "f"}).tool_choice == named
    assert read(function_call="none").tool_choice == ToolChoice("none")
    assert read(tool_choice={"type": "auto"}).tool_choice == ToolChoice("auto")


@pytest.mark.parametrize(
    "listed",
    [
        {"allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}},
        {"allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "f"}]}},
        {"mode": "required", "tools": [{"type": "function", "name": "f"}]},
    ],
)
def test_only_the_allowed_tools_are_offered(listed: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("e", "f", "g")]
    request = read(tools=tools, tool_choice={"type": "allowed_tools", **listed})
    assert request.tool_choice == ToolChoice("required")
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.warnings == ()


@pytest.mark.parametrize(
    ("allowed", "why"),
    [
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "z"}}]}, "allows the tool 'z', which is"),
        ({"mode": "auto"}, "lists no allowed tools"),
    ],
)
def test_allowed_tools_that_do_not_exist_or_are_missing_are_refused(allowed: dict[str, Any], why: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match=why):
        read(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})


def test_an_unknown_choice_is_auto_with_a_warning() -> None:
    request = read(tool_choice="maybe")
    assert request.tool_choice == ToolChoice("auto")
    assert "'maybe'" in request.warnings[0]


def test_choice_and_parallel_calls_are_written_only_beside_tools() -> None:
    request = Request(model="m", tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    assert written(request).keys() == {"model", "messages"}
    out = written(replace(request, tools=(Tool("f"),)))
    assert (out["tool_choice"], out["parallel_tool_calls"]) == ("required", False)


def test_a_choice_of_an_unknown_tool_is_not_written() -> None:
    request = Request(model="m", tools=(Tool("f"),), tool_choice=ToolChoice("named", "g"))
    assert "tool_choice" not in written(request)


def test_a_deferred_tool_is_written_once_a_message_refers_to_it() -> None:
    tools = (Tool("f"), Tool("Grep", deferred=True))
    found = Message("tool", (ToolResult("a", (ToolReference("Grep"),)),))
    before = written(Request(model="m", tools=tools))["tools"]
    after = written(Request(model="m", tools=tools, messages=(found,)))["tools"]
    assert [tool["function"]["name"] for tool in before] == ["f"]
    assert [tool["function"]["name"] for tool in after] == ["f", "Grep"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Reasoning()),
        ({"reasoning_effort": "high"}, Reasoning(effort="high")),
        ({"reasoning_effort": "none"}, Reasoning(enabled=False, effort="none")),
        ({"reasoning": {"effort": "low", "exclude": True}}, Reasoning(effort="low", visible=False, both_names=True)),
        ({"reasoning": {"enabled": True, "max_tokens": 99}}, Reasoning(enabled=True, budget=99, both_names=True)),
        ({"include_reasoning": True}, Reasoning(visible=True, both_names=True)),
        ({"include_reasoning": False}, Reasoning(visible=False)),
        ({"reasoning_format": "deepseek"}, Reasoning()),
        ({"reasoning_format": "none"}, Reasoning(in_text="only")),
        ({"reasoning_format": "raw"}, Reasoning(in_text="only")),
        ({"reasoning_format": "deepseek-legacy"}, Reasoning(in_text="too")),
        ({"reasoning_format": "hidden"}, Reasoning(visible=False)),
        ({"enable_thinking": False}, Reasoning(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, Reasoning(enabled=True, budget=2048)),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False)),
        ({"thinking": {"type": "new-word"}}, Reasoning()),
        ({"thinking": True}, Reasoning(enabled=True)),
        ({"thinking": "off"}, Reasoning(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, Reasoning(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": "soon"}}, Reasoning()),
    ],
)
def test_every_form_of_the_reasoning_switch_is_read(fields: dict[str, Any], expected: Reasoning) -> None:
    assert read(**fields).reasoning == expected


def test_the_templates_thinking_switch_moves_into_the_reasoning() -> None:
    request = read(chat_template_kwargs={"enable_thinking": True, "flavour": 1})
    assert request.chat_template_kwargs == {"flavour": 1}
    assert request.reasoning == Reasoning(enabled=True)
    assert written(request)["chat_template_kwargs"] == {"flavour": 1, "enable_thinking": True}


def test_an_effort_of_none_is_written_without_the_template_switch() -> None:
    out = written(read(reasoning_effort="none"))
    assert out["reasoning_effort"] == "none"
    assert "chat_template_kwargs" not in out


def test_the_fields_of_vllm_and_llama_server_are_read() -> None:
    request = read(prompt_logprobs=2, min_tokens=3, ignore_eos=True, ebnf='root ::= "a"')
    assert (request.prompt_logprobs, request.constraint) == (2, Constraint("gbnf", 'root ::= "a"'))
    assert (request.sampling.min_tokens, request.sampling.ignore_eos) == (3, True)


@pytest.mark.parametrize(
    ("fields", "timings", "progress"),
    [
        ({}, None, False),
        ({"timings_per_token": False}, "last", False),
        ({"timings_per_token": True}, "all", False),
        ({"return_progress": True}, "last", False),
        ({"return_progress": True, "stream": True}, "last", True),
        ({"return_progress": True, "timings_per_token": True, "stream": True}, "all", True),
    ],
)
def test_times_and_progress_come_on_request(fields: dict[str, Any], timings: str | None, progress: bool) -> None:
    request = read(**fields)
    assert (request.timings, request.progress) == (timings, progress)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"stream": True}, "send stream: false"), ({"prompt_logprobs": 21}, "between 0 and 20")],
)
def test_log_probabilities_of_a_prompt_have_limits(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        read(**({"prompt_logprobs": 1} | fields))
    assert refused.value.param == "prompt_logprobs"
