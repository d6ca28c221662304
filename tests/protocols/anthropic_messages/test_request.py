"""Messages bodies as real clients send them, and errors for invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import (
    Constraint,
    Document,
    Image,
    Message,
    Part,
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
from modelyard.protocols import anthropic_messages
from modelyard.protocols.anthropic_messages import read_request
from modelyard.protocols.common.reasoning_signature import pack_reasoning

USER = {"role": "user", "content": "hi"}


def read(headers: dict[str, str] | None = None, **fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], "max_tokens": 10} | fields
    return anthropic_messages.read_request(msgspec.json.encode(body), headers or {})


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    return caught.value


def test_the_module_is_a_wire_protocol() -> None:
    protocol: WireProtocol = anthropic_messages
    assert protocol.NAME == "anthropic_messages"
    assert protocol.PATHS == ("/v1/messages",)


def test_a_short_request_is_read() -> None:
    request = read(system="be brief", stream=True, stop_sequences=["END"], temperature=0.5, top_k=3)
    assert request == Request(
        model="m",
        messages=(Message("system", (Text("be brief"),)), Message("user", (Text("hi"),))),
        max_tokens=10,
        stop=("END",),
        stream=True,
        sampling=Sampling(temperature=0.5, top_k=3),
    )


def test_a_count_tokens_body_needs_no_max_tokens() -> None:
    assert read(max_tokens=None).max_tokens is None
    assert anthropic_messages.read_request(b'{"model":"m","messages":[{"role":"user"}]}', {}).messages[0].parts == ()


def test_a_string_equals_one_text_block_and_cache_control_leaves_no_trace() -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert read(messages=[{"role": "user", "content": [block]}], system=[block]) == read(system="hi")


def test_unknown_fields_betas_and_enum_values_are_accepted() -> None:
    request = read(
        safeguards=[{"type": "x"}],
        service_tier="auto",
        thinking={"type": "dreaming", "display": "updates"},
        tool_choice={"type": "perhaps"},
        output_config={"effort": "astronomic"},
    )
    assert request.reasoning == Reasoning(effort="astronomic", summary="updates")
    assert request.tool_choice == ToolChoice()
    assert request.warnings == ("field_ignored:service_tier", "tool_choice_unknown:perhaps")


def test_an_unknown_output_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'poem' is unknown") as caught:
        read(output_config={"format": {"type": "poem"}})
    assert caught.value.param == "output_config.format.type"


# --- the system prompt ----------------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.177; cch=9f3a1;"


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "be brief"}],
        f"{BILLING}\nbe brief",
        [{"type": "text", "text": f"{BILLING}\n\nbe brief"}],
    ],
)
def test_the_billing_header_is_dropped_from_the_system_prompt(system: Any) -> None:
    request = read(system=system)
    assert request.messages[0] == Message("system", (Text("be brief"),))
    assert request.warnings == ("billing_header_dropped",)


def test_a_system_prompt_with_only_the_billing_header_is_dropped() -> None:
    request = read(system=BILLING, messages=[USER, {"role": "system", "content": BILLING}])
    assert request.messages == (Message("user", (Text("hi"),)),)


@pytest.mark.parametrize("system", ["", None, [], [{"type": "text", "text": ""}]])
def test_an_empty_system_prompt_is_dropped(system: Any) -> None:
    assert read(system=system) == read()


def test_user_text_that_looks_like_billing_is_kept() -> None:
    assert read(messages=[{"role": "user", "content": BILLING}]).messages[0].parts == (Text(BILLING),)


def test_a_system_message_keeps_its_position() -> None:
    request = read(system="head", messages=[USER, {"role": "system", "content": "later"}])
    assert [message.role for message in request.messages] == ["system", "user", "system"]


# --- tools ----------------------------------------------------------------------------------------------------------


def test_tools_keep_their_schema_and_deferred_ones_are_marked() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [
        {"name": "a", "description": "d", "input_schema": schema, "strict": True, "eager_input_streaming": True},
        {"type": "custom", "name": "b", "input_schema": schema, "defer_loading": True},
    ]
    assert read(tools=tools).tools == (
        Tool("a", "d", schema, strict=True),
        Tool("b", "", schema, deferred=True),
    )


def test_server_tools_are_accepted_with_their_settings() -> None:
    tools = [
        {"name": "a"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "code_execution_20260521"},
    ]
    assert read(tools=tools).tools[1:] == (
        Tool("web_search", "", {"max_uses": 8}, "server", "web_search_20250305"),
        Tool("code_execution_20260521", "", {}, "server", "code_execution_20260521"),
    )


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), None),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "a", "disable_parallel_tool_use": False}, ToolChoice("named", "a"), True),
        ({"type": "none"}, ToolChoice("none"), None),
        ("auto", ToolChoice(), None),
    ],
)
def test_every_tool_choice_has_its_mode(choice: Any, mode: ToolChoice, parallel: bool | None) -> None:
    request = read(tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (mode, parallel)


def test_tool_results_become_tool_messages_in_their_position() -> None:
    def result(id: str) -> dict[str, str]:
        return {"type": "tool_result", "tool_use_id": id, "content": "ok"}

    text = {"type": "text", "text": "and?"}
    turns = [{"role": "user", "content": [result("1")]}, {"role": "user", "content": [result("2"), text]}]
    done = (Text("ok"),)
    assert read(messages=turns).messages == (
        Message("tool", (ToolResult("1", done), ToolResult("2", done))),
        Message("user", (Text("and?"),)),
    )


# --- thinking, structure, identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "reasoning"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, Reasoning(enabled=True, budget=2048)),
        ({"type": "adaptive", "display": "omitted"}, Reasoning(enabled=True, summary="omitted")),
        ({"type": "disabled"}, Reasoning(enabled=False)),
        (None, Reasoning()),
    ],
)
def test_every_thinking_type_is_read(thinking: Any, reasoning: Reasoning) -> None:
    assert read(thinking=thinking).reasoning == reasoning


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"json_schema": {"type": "object"}},
    ],
)
def test_structured_output_becomes_a_constraint(fields: Any) -> None:
    assert read(**fields).constraint == Constraint("json_schema", '{"type":"object"}')


def test_metadata_names_the_user_and_is_kept() -> None:
    request = read(metadata={"user_id": "u", "more": 1})
    assert (request.user, request.session, request.metadata) == ("u", "u", {"user_id": "u", "more": 1})


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-claude-code-session-id": "s"}, "s"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-session-id": "o"}, "s:a"),
        ({"x-session-id": "i", "x-session-affinity": "f"}, "i"),
        ({"x-session-affinity": "f"}, "f"),
        ({}, "u"),
    ],
)
def test_the_session_key_comes_from_the_best_header(headers: dict[str, str], session: str) -> None:
    assert read(headers, metadata={"user_id": "u"}).session == session


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: at least one message is required"),
        ({"messages": [USER, {"role": "wizard"}]}, "messages[1].role", "unknown role 'wizard', expected one of user,"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": [{"content": "hi"}]}, "messages[0]", "missing required field `role`"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[...].content", "Expected"),
        ({"model": ""}, "model", "model: the name of a model is required"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens", "got -5"),
        ({"max_tokens": "many"}, "max_tokens", "Expected `int | null`"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]", "empty string"),
        ({"tools": [{"description": "d"}]}, "tools[0].name", "a tool needs a name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "name the tool"),
        ({"system": [{"type": "text"}]}, "system[0].text", "system[0].text: a string is required"),
        ({"temperature": -1}, "temperature", "between 0 and 1"),
    ],
)
def test_invalid_fields_are_reported_with_their_path(fields: Any, param: str, message: str) -> None:
    error = refused(**fields)
    assert message in error.message
    assert (error.param or "").replace("[0]", "[...]") == param.replace("[0]", "[...]")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","temperature":NaN,"messages":[{"role":"user","content":"a"}]}',
        b'{"model":"m","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":"m","metadata":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b',"messages":[]}',
        b'{"model":"m","messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":'
        b'{"x":"\xff"}}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":5}]}]}',
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        anthropic_messages.read_request(body, {})


def test_ten_thousand_tools_are_read() -> None:
    tools = [{"name": f"t{i}", "input_schema": {"type": "object"}} for i in range(10_000)]
    assert len(read(tools=tools).tools) == 10_000


# --- content blocks -------------------------------------------------------------------------------------------------


def parts_and_warnings(*blocks: Any, role: str = "user") -> tuple[tuple[Part, ...], tuple[str, ...]]:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": role, "content": blocks}]})
    request = read_request(body, {})
    return request.messages[0].parts, request.warnings


def part(block: Any, role: str = "user") -> Part:
    parts, warnings = parts_and_warnings(block, role=role)
    assert len(parts) == 1
    assert warnings == ()
    return parts[0]


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "QUJD"}, "data:image/png;base64,QUJD"),
        ({"type": "url", "url": "https://example.com/a.png"}, "https://example.com/a.png"),
        ({"type": "file", "file_id": "file_1"}, "file-id:file_1"),
    ],
)
def test_images_of_every_source_become_urls(source: Any, url: str) -> None:
    assert part({"type": "image", "source": source}) == Image(url)


def test_a_text_document_becomes_text_under_its_title() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    assert part({"type": "document", "source": source, "title": "Title", "context": None}) == Text("Title\n\nbody")


def test_a_document_of_blocks_becomes_its_blocks() -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    parts, _ = parts_and_warnings({"type": "document", "source": source, "title": "T"})
    assert parts == (Text("T"), Text("a"), Text("b"))


def test_a_search_result_becomes_text_with_its_source() -> None:
    block = {
        "type": "search_result",
        "source": "https://a",
        "title": "T",
        "content": [{"type": "text", "text": "found"}],
    }
    assert part(block) == Text("T\nhttps://a\n\nfound")


def test_the_model_is_told_of_an_image_in_an_unknown_form() -> None:
    parts, warnings = parts_and_warnings({"type": "image", "source": {"type": "hologram"}})
    assert parts == (Text("[image: it was sent in a form that is not read here]"),)
    assert warnings == ("image_dropped:hologram",)


@pytest.mark.parametrize(
    ("block", "warning"),
    [
        ({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}, "block_dropped:server_tool_use"),
        (
            {"type": "web_search_tool_result", "tool_use_id": "a", "content": {"type": "error"}},
            "block_dropped:web_search_tool_result",
        ),
        ({"type": "smell", "text": {"a": 1}, "source": 5, "id": [], "content": 1.5}, "block_dropped:smell"),
    ],
)
def test_unsupported_blocks_are_dropped_with_a_warning(block: Any, warning: str) -> None:
    parts, warnings = parts_and_warnings({"type": "text", "text": "hi"}, block, block)
    assert (parts, warnings) == ((Text("hi"),), (warning,))


def test_the_model_is_told_of_a_document_that_it_cannot_read() -> None:
    parts, warnings = parts_and_warnings({"type": "document", "title": "Terms", "source": {"type": "file"}})
    assert parts == (Text("Terms\n\n[document: this model reads text only]"),)
    assert warnings == ("document_replaced:file",)


def test_a_pdf_keeps_its_title_and_context() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    block = {"type": "document", "title": "Terms", "context": "of 2026", "source": source}
    assert parts_and_warnings(block)[0] == (Text("of 2026"), Document("data:application/pdf;base64,AAAA", "Terms"))
    source = {"type": "url", "url": "https://example.com/a.pdf"}
    assert parts_and_warnings({"type": "document", "source": source})[0] == (Document("https://example.com/a.pdf"),)


# --- thinking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "thinking"),
    [
        ({"type": "thinking", "thinking": "hm", "signature": "theirs"}, Thinking("hm", "theirs")),
        ({"type": "thinking", "thinking": "hm"}, Thinking("hm")),
        ({"type": "thinking", "thinking": "", "signature": pack_reasoning("hm")}, Thinking("hm", pack_reasoning("hm"))),
        ({"type": "thinking", "signature": pack_reasoning("hm")}, Thinking("hm", pack_reasoning("hm"))),
        ({"type": "thinking", "thinking": "", "signature": "theirs"}, Thinking("", "theirs")),
        ({"type": "redacted_thinking", "data": pack_reasoning("hm")}, Thinking("hm", pack_reasoning("hm"))),
        ({"type": "redacted_thinking", "data": "theirs"}, Thinking("", "theirs", redacted=True)),
    ],
)
def test_thinking_is_read_from_its_text_or_its_signature(block: Any, thinking: Thinking) -> None:
    assert part(block, "assistant") == thinking


# --- calls and results ----------------------------------------------------------------------------------------------


def test_arguments_keep_their_exact_text() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"assistant","content":'
        b'[{"type":"tool_use","id":"c","name":"f","input":{"b": 5000.0,\n "a":[ ]}}]}]}'
    )
    assert read_request(body, {}).messages[0].parts == (ToolCall("c", "f", '{"b": 5000.0,\n "a":[ ]}'),)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, "{}"),
        ({"input": None}, "{}"),
        ({"input": {"__unparsedToolInput": {"raw": '{"a": ', "len": 6}}}, '{"a": '),
        ({"input": {"__unparsedToolInput": 5}}, '{"__unparsedToolInput":5}'),
    ],
)
def test_missing_and_unparsed_input_are_read(given: Any, arguments: str) -> None:
    assert part({"type": "tool_use", "id": "c", "name": "f"} | given, "assistant") == ToolCall("c", "f", arguments)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({}, ()),
        ({"content": None}, ()),
        ({"content": "ok"}, (Text("ok"),)),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "t"}]},
            (Text("a"), ToolReference("t")),
        ),
        ({"content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}, (Image("u"),)),
    ],
)
def test_results_contain_strings_texts_images_and_tool_references(content: Any, parts: Any) -> None:
    assert part({"type": "tool_result", "tool_use_id": "c"} | content) == ToolResult("c", parts)


def test_a_failed_result_is_marked() -> None:
    result = part({"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True})
    assert result == ToolResult("c", (Text("no"),), is_error=True)


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "text", "text": 5}, "text"),
        ({"type": "tool_use", "name": "f"}, "id"),
        ({"type": "tool_result", "content": "x"}, "tool_use_id"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}, "content[0].text"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"text": "a"}]}, "content[0]"),
        ({"type": "image", "source": {"type": "base64", "data": "a"}}, "source.media_type"),
        ({"type": "image", "source": "a"}, "source"),
    ],
)
def test_an_invalid_block_is_reported_with_its_path(block: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parts_and_warnings({"type": "text", "text": "a"}, block)
    assert caught.value.param == f"messages[0].content[1].{param}"
    assert caught.value.message.startswith(f"messages[0].content[1].{param}: ")
