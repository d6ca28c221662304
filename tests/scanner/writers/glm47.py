from __future__ import annotations

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = ""
    for tool, arguments in calls:
        pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{raw(v)}</arg_value>" for k, v in arguments.items())
        given += f"<tool_call>{tool.name}{pairs}</tool_call>"
    return f"<think>{reasoning}</think>{text}{given}"
