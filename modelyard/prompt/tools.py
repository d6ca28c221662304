"""The tools on offer, in the shape that templates expect, and in words where a template has no place for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from modelyard.core.request import Tool
from modelyard.prompt.sandbox import Frozen, tojson
from modelyard.tokenizer.shield import Shield

_REMEMBERED = 4 << 20  # bytes of JSON: an agent sends the same list with each request
_encode = msgspec.json.Encoder().encode
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def definition(tool: Tool, shield: Shield) -> Frozen:
    """OpenAI's function shape. A custom tool is a function with one string, `input`."""
    parameters = _FREE_TEXT if tool.kind == "custom" else tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": shield(tool.name),
        "description": shield(_description(tool)),
        "parameters": shield.deep(parameters),
    }
    return Frozen(type="function", function=Frozen(function))


def _description(tool: Tool) -> str:
    """A custom tool's grammar is told in words, too: a model that is only held to it would not know what it writes."""
    rules = tool.grammar.get("definition") if tool.kind == "custom" and tool.grammar else None
    if not isinstance(rules, str) or not rules:
        return tool.description
    syntax = tool.grammar.get("syntax", "lark") if tool.grammar else ""
    return f"{tool.description}\nThe input is text of this form ({syntax}):\n{rules.strip()}".lstrip()


class Toolbox:
    """Definitions of the tools that stand at the head of a prompt: neither deferred nor run by somebody else."""

    def __init__(self, shield: Shield) -> None:
        self._shield = shield
        self._known: dict[bytes, list[Frozen]] = {}
        self._held = 0

    def offered(self, tools: Sequence[Tool]) -> list[Frozen]:
        shown = [tool for tool in tools if not tool.deferred and tool.kind != "server"]
        if not shown:
            return []
        key = _encode(shown)
        found = self._known.get(key)
        if found is None:
            self._held += len(key)
            if self._held > _REMEMBERED:
                self._known, self._held = {}, len(key)
            found = self._known[key] = [definition(tool, self._shield) for tool in shown]
        return found

    def announce(self, name: str, tools: Iterable[Tool]) -> str:
        """The text that stands where a deferred tool was discovered."""
        for tool in tools:
            if tool.name == name:
                return f"From here on this tool can be called too:\n{tojson(definition(tool, self._shield))}"
        return f"[the tool {self._shield(name)} was found here]"


def instructions(tools: Sequence[Frozen]) -> str:
    """For templates that know no tools: the list in words, with the most common way to call one."""
    listed = "\n".join(tojson(tool) for tool in tools)
    return (
        f"You can call these tools. Each line defines one as JSON:\n<tools>\n{listed}\n</tools>\n"
        "To call a tool, write its name and arguments as one JSON object between these tags, and nothing after them:\n"
        '<tool_call>\n{"name": "the tool", "arguments": {"parameter": "value"}}\n</tool_call>'
    )
