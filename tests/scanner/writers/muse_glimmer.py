from __future__ import annotations

from typing import Any

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    messages = [("self", reasoning)] if reasoning else []
    messages += [("user", text)] if text or not calls else []
    messages += [(tool.name, _call(tool.name, arguments)) for tool, arguments in calls]
    return "<|eom|>".join(f"<|start|>assistant to={to}<|message|>{body}" for to, body in messages) + "<|eot|>"


def _call(name: str, arguments: dict[str, Any]) -> str:
    given = "".join(f'<atem:parameter name="{k}">{raw(v)}</atem:parameter>\n' for k, v in arguments.items())
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{given}</atem:invoke>\n</atem:function_calls>'
