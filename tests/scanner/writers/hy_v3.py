from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._hunyuan import turn


def write(reasoning: str, text: str, calls: Calls) -> str:
    return turn(reasoning, text, calls, ":opensource")
