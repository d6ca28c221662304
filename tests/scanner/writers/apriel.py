from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import listed


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"Here are my reasoning steps:\n{reasoning}\n" if reasoning else ""
    given = f"\n<tool_calls>{listed(calls)}</tool_calls>" if calls else ""
    return f"{thought}[BEGIN FINAL RESPONSE]\n{text}{given}\n[END FINAL RESPONSE]\n<|end|>"
