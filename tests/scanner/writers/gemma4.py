from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._gemma import call

_QUOTE = '<|"|>'


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<|channel>thought\n{reasoning}\n<channel|>" if reasoning else ""
    given = (f"<|tool_call>{call(tool.name, arguments, _QUOTE)}<tool_call|>" for tool, arguments in calls)
    return f"{thought}{text}{''.join(given)}{'<|tool_response>' if calls else '<turn|>'}"
