"""Tools and the choice among them, both ways: flat functions, free-form customs, namespaces, other people's servers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, cast

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Tool, ToolChoice

Wire = dict[str, Any]
MODES = ("auto", "none", "required")


# --- reading --------------------------------------------------------------------------------------------------------


def read_tools(tools: list[Wire]) -> tuple[Tool, ...]:
    return tuple(tool for index, wire in enumerate(tools) for tool in _read_tool(wire, f"tools[{index}]", None))


def _read_tool(wire: Wire, path: str, namespace: str | None) -> Iterator[Tool]:
    kind = _text(wire, "type", path) or "function"
    if kind == "function":
        yield _read_function(wire, path, namespace)
    elif kind == "custom":
        yield _read_custom(wire, path, namespace)
    elif kind == "namespace":
        yield from _read_namespace(wire, path)
    else:  # its settings are kept, so that a server which knows the tool gets it whole
        settings = {name: value for name, value in wire.items() if name != "type"}
        yield Tool(kind, parameters=settings, kind="server", type=kind, namespace=namespace)


def _read_function(wire: Wire, path: str, namespace: str | None) -> Tool:
    parameters = wire.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{path}.parameters must be a JSON schema object", param=f"{path}.parameters")
    strict = wire.get("strict")
    return Tool(
        _name(wire, path),
        _text(wire, "description", path) or "",
        parameters or {},
        namespace=namespace,
        strict=strict if isinstance(strict, bool) else None,
        deferred=wire.get("defer_loading") is True,
    )


def _read_custom(wire: Wire, path: str, namespace: str | None) -> Tool:
    shape = wire.get("format")
    grammar = None
    if isinstance(shape, dict) and shape.get("type") == "grammar":
        grammar = {name: value for name, value in shape.items() if name != "type"}
    return Tool(
        _name(wire, path),
        _text(wire, "description", path) or "",
        kind="custom",
        namespace=namespace,
        deferred=wire.get("defer_loading") is True,
        grammar=grammar,
    )


def _read_namespace(wire: Wire, path: str) -> Iterator[Tool]:
    name, nested = _name(wire, path), wire.get("tools")
    if not isinstance(nested, list) or not all(isinstance(tool, dict) for tool in nested):
        raise InvalidRequest(f"{path}.tools must be a list of tools", param=f"{path}.tools")
    for index, tool in enumerate(nested):
        where = f"{path}.tools[{index}]"
        if tool.get("type") == "namespace":
            raise InvalidRequest(f"{where}: a namespace cannot hold another one", param=where)
        yield from _read_tool(tool, where, name)


def _name(wire: Wire, path: str) -> str:
    name = _text(wire, "name", path)
    if not name:
        raise InvalidRequest(f"{path}.name is missing; on this wire a tool's name stands beside its type", param=path)
    return name


def _text(wire: Wire, field: str, path: str) -> str | None:
    value = wire.get(field)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{path}.{field} must be a string", param=f"{path}.{field}")
    return value


def read_choice(
    wire: str | Wire | None, tools: tuple[Tool, ...], warnings: list[str]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that are left on offer under it."""
    if wire is None or isinstance(wire, str):
        return _read_mode(wire, warnings), tools
    if wire.get("type") in ("function", "custom") and isinstance(wire.get("name"), str):
        return ToolChoice("named", wire["name"]), tools
    if wire.get("type") == "allowed_tools" and isinstance(wire.get("tools"), list):
        allowed = [tool.get("name") or tool.get("type") for tool in wire["tools"] if isinstance(tool, dict)]
        return _read_mode(wire.get("mode"), warnings), tuple(tool for tool in tools if tool.name in allowed)
    warnings.append(f"tool_choice of type {wire.get('type')!r} is taken as 'auto'")
    return ToolChoice(), tools


def _read_mode(mode: object, warnings: list[str]) -> ToolChoice:
    if mode is None or mode == "auto":
        return ToolChoice()
    if mode in MODES:
        return ToolChoice(cast("Any", mode))
    warnings.append(f"tool_choice {mode!r} is taken as 'auto'")
    return ToolChoice()


# --- writing --------------------------------------------------------------------------------------------------------


def write_tools(tools: tuple[Tool, ...]) -> list[Wire]:
    """Neighbouring tools of one namespace share its entry."""
    out: list[Wire] = []
    for namespace, group in groupby(tools, key=lambda tool: tool.namespace):
        written = [_write_tool(tool) for tool in group]
        if namespace is None:
            out += written
        else:
            out.append({"type": "namespace", "name": namespace, "description": "", "tools": written})
    return out


def _write_tool(tool: Tool) -> Wire:
    if tool.kind == "server":
        return {"type": tool.type or tool.name} | tool.parameters
    out: Wire = {"type": tool.kind, "name": tool.name, "description": tool.description}
    if tool.kind == "custom":
        out["format"] = {"type": "text"} if tool.grammar is None else {"type": "grammar"} | tool.grammar
    else:
        out |= {"parameters": tool.parameters, "strict": tool.strict}
    return out | {"defer_loading": True} if tool.deferred else out


def write_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> str | Wire:
    if choice.mode != "named":
        return choice.mode
    custom = any(tool.kind == "custom" and tool.name == choice.name for tool in tools)
    return {"type": "custom" if custom else "function", "name": choice.name}
