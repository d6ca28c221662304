from __future__ import annotations

import json

from tests.scanner.writers import Calls


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(
        f"<|tool_call_begin|>functions.{tool.name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
        for i, (tool, arguments) in enumerate(calls)
    )
    section = f"<|tool_calls_section_begin|>{given}<|tool_calls_section_end|>" if given else ""
    return f"<think>{reasoning}</think>{text}{section}<|im_end|>"
