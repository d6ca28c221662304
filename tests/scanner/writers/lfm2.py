from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._python import call


def write(reasoning: str, text: str, calls: Calls) -> str:
    head = f"<think>{reasoning}</think>" if reasoning else ""
    joined = ", ".join(call(tool, arguments) for tool, arguments in calls)
    return head + text + (f"<|tool_call_start|>[{joined}]<|tool_call_end|>" if calls else "")
