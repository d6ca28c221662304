from __future__ import annotations

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = ""
    for tool, arguments in calls:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in arguments.items())
        given += f"\n<tool_call>{tool.name}\n{pairs}</tool_call>"
    return f"\n<think>{reasoning}</think>\n{text}{given}"
