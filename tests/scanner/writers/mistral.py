from __future__ import annotations

import json

from tests.scanner.writers import Calls


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"[THINK]{reasoning}[/THINK]" if reasoning else ""
    given = (f"[TOOL_CALLS]{tool.name}[ARGS]{json.dumps(arguments)}" for tool, arguments in calls)
    return thought + text + "".join(given) + "</s>"
