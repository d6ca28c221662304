from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._gemma import call


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = (
        f"<start_function_call>{call(tool.name, arguments, '<escape>')}<end_function_call>" for tool, arguments in calls
    )
    return text + "".join(given) + "<end_of_turn>"
