"""Tools on offer and the choice among them, as Messages bodies spell them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Tool, ToolChoice
from modelyard.protocols.anthropic_messages.body import ToolBody, ToolChoiceBody, tool_fields_decoder
from modelyard.protocols.anthropic_messages.content import Warnings
from modelyard.protocols.common.json import decode

_AUTO = ToolChoice()


def read_tools(tools: list[ToolBody], body: bytes) -> tuple[Tool, ...]:
    fields: list[dict[str, Any]] = []
    if any(_is_server(tool) for tool in tools):
        fields = decode(tool_fields_decoder, body).tools
    return tuple(_each_tool(tools, fields))


def _is_server(tool: ToolBody) -> bool:
    return tool.type is not None and tool.type != "custom"


_NOT_SETTINGS = frozenset({"type", "name", "cache_control", "defer_loading"})


def _each_tool(tools: list[ToolBody], fields: list[dict[str, Any]]) -> Iterator[Tool]:
    for place, tool in enumerate(tools):
        deferred = tool.defer_loading is True
        if _is_server(tool):
            settings = {name: value for name, value in fields[place].items() if name not in _NOT_SETTINGS}
            yield Tool(tool.name or tool.type or "", "", settings, "server", tool.type, deferred=deferred)
        elif tool.name:
            schema = tool.input_schema or {}
            yield Tool(tool.name, tool.description or "", schema, strict=tool.strict, deferred=deferred)
        else:
            raise InvalidRequest(f"tools[{place}].name: a tool needs a name", param=f"tools[{place}].name")


def read_tool_choice(choice: ToolChoiceBody | str | None, warnings: Warnings) -> tuple[ToolChoice, bool | None]:
    if choice is None:
        return _AUTO, None
    if isinstance(choice, str):
        choice = ToolChoiceBody(choice)
    serial = choice.disable_parallel_tool_use
    return _choice_mode(choice, warnings), None if serial is None else not serial


def _choice_mode(choice: ToolChoiceBody, warnings: Warnings) -> ToolChoice:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name: which tool must be called?", param="tool_choice.name")
        return ToolChoice("named", choice.name)
    if choice.type == "any":
        return ToolChoice("required")
    if choice.type == "none":
        return ToolChoice("none")
    if choice.type != "auto":
        warnings[f"tool_choice_unknown:{choice.type}"] = None
    return _AUTO
