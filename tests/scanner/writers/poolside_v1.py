from __future__ import annotations

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(
        f"<tool_call>{tool.name}"
        + "".join(f"<arg_key>{k}</arg_key><arg_value>{raw(v)}</arg_value>" for k, v in arguments.items())
        + "</tool_call>"
        for tool, arguments in calls
    )
    return f"<think>{reasoning}</think>{text}{given}</assistant>\n"
