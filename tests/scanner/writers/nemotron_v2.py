from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import listed, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = f"\n<TOOLCALL>{listed(calls)}</TOOLCALL>" if calls else ""
    return f"{thought(reasoning)}{text}{given}\n<SPECIAL_12>"
