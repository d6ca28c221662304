"""Chat tools ⇄ core tools, and which of them the model may, must or must not call."""

from __future__ import annotations

from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Request, Tool, ToolChoice, ToolReference, ToolResult
from modelyard.protocols.openai_chat.body import ChatCompletionBody, ChoiceBody, CustomBody, FunctionBody, ToolBody

_MODES: dict[str, ToolChoice] = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def read_tools(body: ChatCompletionBody) -> tuple[Tool, ...]:
    tools = tuple(_read_tool(tool, i) for i, tool in enumerate(body.tools)) if body.tools else ()
    if body.functions:
        tools += tuple(_read_function(function) for function in body.functions)
    return tools


def _read_tool(tool: ToolBody, i: int) -> Tool:
    if tool.function is not None:
        return _read_function(tool.function)
    if tool.custom is not None:
        return _read_custom(tool.custom)
    if tool.type != "function":
        return Tool(tool.name or tool.type, tool.description or "", kind="server", type=tool.type)
    if not tool.name:
        raise InvalidRequest(f"tools[{i}].function is required", param=f"tools[{i}].function")
    return _read_function(FunctionBody(tool.name, tool.description, tool.parameters, tool.strict))


def _read_function(function: FunctionBody) -> Tool:
    return Tool(function.name, function.description or "", function.parameters or {}, strict=function.strict)


def _read_custom(custom: CustomBody) -> Tool:
    """Chat nests a grammar one level deeper than Responses does; inside it is flat."""
    grammar = custom.format
    if grammar and isinstance(grammar.get("grammar"), dict):
        grammar = {"type": "grammar"} | grammar["grammar"]
    return Tool(custom.name, custom.description or "", kind="custom", grammar=grammar)


def read_choice(body: ChatCompletionBody, warnings: list[str]) -> ToolChoice:
    choice: str | ChoiceBody | None = body.tool_choice
    if choice is None and body.function_call is not None:
        old = body.function_call
        choice = old if isinstance(old, str) else ChoiceBody(name=old.name)
    if choice is None:
        return _MODES["auto"]
    if isinstance(choice, ChoiceBody):
        return _read_named(choice, warnings)
    return _read_mode(choice, warnings)


def _read_named(choice: ChoiceBody, warnings: list[str]) -> ToolChoice:
    if choice.type == "allowed_tools":
        warnings.append("allowed_tools_ignored: every offered tool stays allowed")
        return _read_mode((choice.allowed_tools or choice).mode, warnings)
    named = choice.function or choice.custom
    name = named.name if named else choice.name
    if name:
        return ToolChoice("named", name)
    if choice.type in _MODES:
        return _MODES[choice.type]
    raise InvalidRequest("tool_choice names no tool: give its name under function.name", param="tool_choice")


def _read_mode(mode: str, warnings: list[str]) -> ToolChoice:
    if mode not in _MODES:
        warnings.append(f"tool_choice_unknown: {mode!r} is taken as 'auto'")
    return _MODES.get(mode, _MODES["auto"])


# --- the client role ------------------------------------------------------------------------------------------------


def write_tools(request: Request) -> dict[str, Any]:
    """`tools` and what may only stand beside it. A deferred tool is offered once the conversation refers to it."""
    found = _referenced(request) if any(t.deferred for t in request.tools) else frozenset()
    offered = [t for t in request.tools if t.kind != "server" and (not t.deferred or t.name in found)]
    if not offered:
        return {}
    out: dict[str, Any] = {"tools": [_write_tool(tool) for tool in offered]}
    if choice := _write_choice(request.tool_choice, offered):
        out["tool_choice"] = choice
    if request.parallel_tool_calls is not None:
        out["parallel_tool_calls"] = request.parallel_tool_calls
    return out


def _referenced(request: Request) -> frozenset[str]:
    parts = [part for message in request.messages for part in message.parts]
    inner = [part for result in parts if isinstance(result, ToolResult) for part in result.content]
    return frozenset(part.name for part in (*parts, *inner) if isinstance(part, ToolReference))


def _write_tool(tool: Tool) -> dict[str, Any]:
    out: dict[str, Any] = {"name": tool.name}
    if tool.description:
        out["description"] = tool.description
    if tool.kind == "custom":
        if tool.grammar is not None:
            out["format"] = _nest(tool.grammar)
        return {"type": "custom", "custom": out}
    if tool.parameters:
        out["parameters"] = tool.parameters
    if tool.strict is not None:
        out["strict"] = tool.strict
    return {"type": "function", "function": out}


def _nest(grammar: dict[str, Any]) -> dict[str, Any]:
    if grammar.get("type") != "grammar":
        return grammar
    return {"type": "grammar", "grammar": {key: value for key, value in grammar.items() if key != "type"}}


def _write_choice(choice: ToolChoice, offered: list[Tool]) -> str | dict[str, Any] | None:
    """None where nothing need be said. Servers refuse a choice that names a tool which is not on offer."""
    if choice.mode != "named":
        return None if choice.mode == "auto" else choice.mode
    for tool in offered:
        if tool.name == choice.name:
            kind = "custom" if tool.kind == "custom" else "function"
            return {"type": kind, kind: {"name": tool.name}}
    return None
