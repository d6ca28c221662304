from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import thought
from tests.scanner.writers._python import call


def write(reasoning: str, text: str, calls: Calls) -> str:
    lines = "\n".join(call(tool, arguments) for tool, arguments in calls)
    return thought(reasoning) + text + (f"\n<function_calls>\n{lines}\n</function_calls>" if calls else "")
