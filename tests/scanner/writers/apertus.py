from __future__ import annotations

import json

from tests.scanner.writers import Calls


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<|inner_prefix|>{reasoning}<|inner_suffix|>" if reasoning else ""
    given = ", ".join(json.dumps({tool.name: arguments}, ensure_ascii=False) for tool, arguments in calls)
    return f"{thought}{text}" + (f"<|tools_prefix|>[{given}]<|tools_suffix|>" if calls else "") + "<|assistant_end|>"
