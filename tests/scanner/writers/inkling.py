from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<|content_thinking|>{reasoning}<|end_message|><|message_model|>" if reasoning else ""
    answer = f"<|content_text|>{text}<|end_message|>"
    given = "".join(
        f"<|message_model|>{tool.name}<|content_invoke_tool_json|>{one}<|end_message|>"
        for (tool, _), one in zip(calls, objects(calls, arguments="args"), strict=True)
    )
    return f"{thought}{answer}{given}<|content_model_end_sampling|>"
