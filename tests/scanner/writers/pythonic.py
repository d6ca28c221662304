from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._pythonic import listed


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return f"{thought}{text}\n{listed(calls)}" if calls else thought + text
