from __future__ import annotations

from typing import Any

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    given = "\n".join(_invoke(tool.name, arguments) for tool, arguments in calls)
    block = f"\n<dots_function_call>\n{given}\n</dots_function_call>" if calls else ""
    return f"{thought}{text}{block}<|endofresponse|>"


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    given = "".join(f'<parameter name="{k}">{raw(v)}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{name}">\n{given}</invoke>'
