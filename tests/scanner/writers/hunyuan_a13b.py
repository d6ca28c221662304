from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import listed


def write(reasoning: str, text: str, calls: Calls) -> str:
    called = f"<tool_calls>{listed(calls)}</tool_calls>\n" if calls else ""
    return f"<think>\n{reasoning}\n</think>\n<answer>\n{text}\n{called}</answer>"
