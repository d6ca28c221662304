from __future__ import annotations

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    given = "".join(
        f"\n<tool_call>{tool.name}"
        + "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>" for k, v in arguments.items())
        + "\n</tool_call>"
        for tool, arguments in calls
    )
    return f"{thought}{text}{given}<|role_end|>"
