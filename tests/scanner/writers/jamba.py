from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    joined = ",\n    ".join(objects(calls))
    return thought(reasoning) + text + (f"<tool_calls>[\n    {joined}\n]</tool_calls>" if calls else "")
