from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import listed


def write(reasoning: str, text: str, calls: Calls) -> str:
    answer = f"<|START_TEXT|>{text}<|END_TEXT|>" if text else ""
    given = f"<|START_ACTION|>{listed(calls, 'tool_name', 'parameters')}<|END_ACTION|>" if calls else ""
    return f"<|START_THINKING|>{reasoning}<|END_THINKING|>{answer}{given}<|END_OF_TURN_TOKEN|>"
