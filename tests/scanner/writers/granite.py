from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import listed


def write(reasoning: str, text: str, calls: Calls) -> str:
    head = f"<think>{reasoning}</think>" if reasoning else ""
    return f"{head}{text}" + (f"<|tool_call|>{listed(calls)}" if calls else "")
