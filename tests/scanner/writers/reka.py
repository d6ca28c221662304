from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))
    return f"{thought(reasoning)}{text}\n{given}\n\n<sep>"
