from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    said = f"<response>\n{text}\n</response>\n" if text else ""
    return thought(reasoning) + said + "".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in objects(calls))
