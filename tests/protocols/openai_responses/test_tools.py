from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Tool, ToolChoice
from modelyard.protocols.openai_responses.tools import read_choice, read_tools, write_choice, write_tools

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


def test_what_was_read_is_written_the_same() -> None:
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
def test_a_bad_tool_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools([tool])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "shell"}, ToolChoice("named", "shell")),
        ({"type": "custom", "name": "patch"}, ToolChoice("named", "patch")),
    ],
)
def test_choices_are_read_and_written(wire: str | dict[str, Any] | None, choice: ToolChoice) -> None:
    tools, warnings = read_tools([SHELL, PATCH]), list[str]()
    assert read_choice(wire, tools, warnings) == (choice, tools)
    assert write_choice(choice, tools) == (wire or "auto")
    assert warnings == []


def test_allowed_tools_leave_only_those_on_offer() -> None:
    wire = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}
    choice, tools = read_choice(wire, read_tools([SHELL, PATCH]), [])
    assert choice == ToolChoice("required")
    assert [tool.name for tool in tools] == ["shell"]


@pytest.mark.parametrize("wire", ["sometimes", {"type": "web_search"}])
def test_an_unknown_choice_is_auto_with_a_warning(wire: str | dict[str, Any]) -> None:
    warnings: list[str] = []
    assert read_choice(wire, (), warnings) == (ToolChoice(), ())
    assert len(warnings) == 1
