from __future__ import annotations

from typing import Any

from modelyard.core.request import Tool
from tests.scanner.writers import Calls, raw
from tests.scanner.writers._objects import objects


def write(reasoning: str, text: str, calls: Calls) -> str:
    """The first call in the newer shape, the others as JSON."""
    head = f"<longcat_think>\n{reasoning}\n</longcat_think>\n" if reasoning else ""
    bodies = [*(_pairs(tool, given) for tool, given in calls[:1]), *(f"\n{one}" for one in objects(calls[1:]))]
    return head + text + "".join(f"<longcat_tool_call>{body}\n</longcat_tool_call>" for body in bodies)


def _pairs(tool: Tool, given: dict[str, Any]) -> str:
    pair = "\n<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>"
    return tool.name + "".join(pair.format(k, raw(v)) for k, v in given.items())
