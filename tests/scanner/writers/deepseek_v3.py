from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._deepseek import fenced


def write(reasoning: str, text: str, calls: Calls) -> str:
    """The model itself does not reason; its fine-tunes do."""
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    return f"{thought}{text}{fenced(calls)}<｜end▁of▁sentence｜>"
