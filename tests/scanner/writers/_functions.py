"""`<function=…>` with its parameters, each on lines of its own or not."""

from __future__ import annotations

from typing import Any

from tests.scanner.writers import Calls, raw

_LINE = "\n"


def turn(reasoning: str, text: str, calls: Calls) -> str:
    """As the relatives of Qwen 3 Coder write it."""
    thought = f"<think>\n{reasoning}\n</think>\n" if reasoning else ""
    given = "".join(f"<tool_call>\n{function(t.name, arguments, _LINE)}\n</tool_call>\n" for t, arguments in calls)
    return f"{thought}{text}\n{given}<|im_end|>" if calls else f"{thought}{text}<|im_end|>"


def function(name: str, arguments: dict[str, Any], line: str) -> str:
    given = "".join(f"<parameter={k}>{line}{raw(v)}{line}</parameter>\n" for k, v in arguments.items())
    return f"<function={name}>\n{given}</function>"
