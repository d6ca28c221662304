from __future__ import annotations

from tests.scanner.writers import Calls, raw


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = ""
    for tool, arguments in calls:
        inner = "".join(f'<parameter name="{k}">{raw(v)}</parameter>\n' for k, v in arguments.items())
        given += f'<invoke name="{tool.name}">\n{inner}</invoke>\n'
    block = f"\n<minimax:tool_call>\n{given}</minimax:tool_call>" if given else ""
    return f"<think>\n{reasoning}\n</think>\n\n{text}{block}[e~["
