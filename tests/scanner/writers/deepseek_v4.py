from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._deepseek import dsml


def write(reasoning: str, text: str, calls: Calls) -> str:
    return f"<think>{reasoning}</think>{text}{dsml(calls, 'tool_calls')}<｜end▁of▁sentence｜>"
