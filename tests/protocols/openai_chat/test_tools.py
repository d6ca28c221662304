from __future__ import annotations

from msgspec.structs import replace

from modelyard.core.request import Message, Request, Tool, ToolChoice, ToolReference, ToolResult
from tests.protocols.openai_chat.bodies import read, written

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}


def test_functions_are_read_nested_flat_and_old() -> None:
    expected = (Tool("f", "d", {"type": "object"}, strict=True),)
    assert read(tools=[{"type": "function", "function": FUNCTION}]).tools == expected
    assert read(tools=[{"type": "function", **FUNCTION}]).tools == expected
    assert read(functions=[FUNCTION]).tools == expected


def test_a_custom_tool_keeps_its_grammar_flat_inside_and_nested_on_the_wire() -> None:
    request = read(tools=[{"type": "custom", "custom": {"name": "p", "format": GRAMMAR}}])
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    assert request.tools == (Tool("p", kind="custom", grammar=grammar),)
    assert written(request)["tools"] == [{"type": "custom", "custom": {"name": "p", "format": GRAMMAR}}]


def test_tools_of_other_types_are_somebody_elses() -> None:
    request = read(tools=[{"type": "web_search", "filters": {}}])
    assert request.tools == (Tool("web_search", kind="server", type="web_search"),)
    assert "tools" not in written(request)


def test_choices_are_read_in_every_spelling() -> None:
    assert read(tool_choice="none").tool_choice == ToolChoice("none")
    assert read(tool_choice="required").tool_choice == read(tool_choice="any").tool_choice == ToolChoice("required")
    named = ToolChoice("named", "f")
    assert read(tool_choice={"type": "function", "function": {"name": "f"}}).tool_choice == named
    assert read(tool_choice={"type": "function", "name": "f"}).tool_choice == named
    assert read(tool_choice={"type": "custom", "custom": {"name": "f"}}).tool_choice == named
    assert read(function_call={"name": "f"}).tool_choice == named
    assert read(function_call="none").tool_choice == ToolChoice("none")
    assert read(tool_choice={"type": "auto"}).tool_choice == ToolChoice("auto")


def test_allowed_tools_keep_their_mode() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
    request = read(tool_choice=allowed)
    assert request.tool_choice == ToolChoice("required")
    assert request.warnings[0].startswith("allowed_tools_ignored")


def test_an_unknown_choice_is_auto_with_a_warning() -> None:
    request = read(tool_choice="maybe")
    assert request.tool_choice == ToolChoice("auto")
    assert "'maybe'" in request.warnings[0]


def test_choice_and_parallel_calls_are_written_only_beside_tools() -> None:
    request = Request(model="m", tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    assert written(request).keys() == {"model", "messages"}
    out = written(replace(request, tools=(Tool("f"),)))
    assert (out["tool_choice"], out["parallel_tool_calls"]) == ("required", False)


def test_a_choice_of_a_tool_that_is_not_on_offer_is_not_written() -> None:
    request = Request(model="m", tools=(Tool("f"),), tool_choice=ToolChoice("named", "g"))
    assert "tool_choice" not in written(request)


def test_a_deferred_tool_is_offered_once_the_conversation_refers_to_it() -> None:
    tools = (Tool("f"), Tool("Grep", deferred=True))
    found = Message("tool", (ToolResult("a", (ToolReference("Grep"),)),))
    before = written(Request(model="m", tools=tools))["tools"]
    after = written(Request(model="m", tools=tools, messages=(found,)))["tools"]
    assert [tool["function"]["name"] for tool in before] == ["f"]
    assert [tool["function"]["name"] for tool in after] == ["f", "Grep"]
