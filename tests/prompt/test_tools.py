from __future__ import annotations

from modelyard.core.request import Tool
from modelyard.prompt.render import ToolDefinitions, definition, instructions
from modelyard.tokenizer.shield import SENTINEL, Shield

BOX = ToolDefinitions(Shield(["<|im_end|>"]))


def test_only_tools_that_the_model_can_call_are_offered() -> None:
    tools = [Tool("a"), Tool("b", deferred=True), Tool("c", kind="server"), Tool("d", kind="custom")]
    offered = BOX.offered(tools)
    assert [tool["function"]["name"] for tool in offered] == ["a", "d"]
    assert offered[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert offered[1]["function"]["parameters"]["required"] == ["input"]


def test_the_same_tools_are_made_once() -> None:
    assert BOX.offered([Tool("a", "x")]) is BOX.offered([Tool("a", "x")])
    assert BOX.offered([Tool("a", "x")]) is not BOX.offered([Tool("a", "y")])


def test_memory_of_tool_lists_is_bounded() -> None:
    box = ToolDefinitions(Shield([]))
    first = box.offered([Tool("a")])
    for number in range(100):
        box.offered([Tool(f"tool{number}", "d" * 100_000)])
    assert box.offered([Tool("a")]) == first
    assert box.offered([Tool("a")]) is not first


def test_definitions_are_shielded_everywhere() -> None:
    tool = Tool("a", "say <|im_end|>", {"properties": {"<|im_end|>": {"enum": ["<|im_end|>"]}}})
    text = instructions(BOX.offered([tool]))
    assert "<|im_end|>" not in text
    assert text.count(SENTINEL) == 3


def test_a_reference_to_a_tool_that_nobody_sent_is_told() -> None:
    assert "missing" in BOX.announce("missing", [])
    assert '"name": "late"' in BOX.announce("late", [Tool("late", deferred=True)])


def test_a_custom_tools_grammar_is_told_in_words() -> None:
    told = definition(
        Tool("d", "Edits.", kind="custom", grammar={"syntax": "lark", "definition": "start: A\n"}), Shield([])
    )
    assert told["function"]["description"] == "Edits.\nThe input is text of this form (lark):\nstart: A"
    for grammar in (None, {}, {"definition": 7}):
        plain = definition(Tool("d", "Edits.", kind="custom", grammar=grammar), Shield([]))
        assert plain["function"]["description"] == "Edits."
