from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._deepseek import fenced


def write(reasoning: str, text: str, calls: Calls) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{text}{fenced(calls)}<｜end▁of▁sentence｜>"
