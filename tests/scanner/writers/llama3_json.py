from __future__ import annotations

import json

from tests.scanner.writers import Calls


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    given = "; ".join(json.dumps({"name": tool.name, "parameters": arguments}) for tool, arguments in calls)
    return f"{thought}{text}\n{given}<|eot_id|>" if given else f"{thought}{text}<|eot_id|>"
