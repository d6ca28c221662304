from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import listed, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    return thought(reasoning) + text + (f"\nfunctools{listed(calls)}" if calls else "")
