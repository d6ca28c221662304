from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects


def write(reasoning: str, text: str, calls: Calls) -> str:
    said = f"<|START_RESPONSE|>{text}<|END_RESPONSE|>" if text else ""
    joined = ",\n    ".join(objects(calls, "tool_name", "parameters"))
    called = f"<|START_ACTION|>[\n    {joined}\n]<|END_ACTION|>" if calls else ""
    return f"<|START_THINKING|>{reasoning}<|END_THINKING|>{said}{called}"
