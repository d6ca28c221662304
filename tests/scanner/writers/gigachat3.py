from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{one}" for one in objects(calls))
    return f"{thought(reasoning)}{text}{given}</s>"
