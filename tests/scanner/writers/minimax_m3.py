"""Nested values of unknown types cannot be told from their elements, so they are written as JSON here."""

from __future__ import annotations

from tests.scanner.writers import Calls, raw

NS = "]<]minimax[>["


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = ""
    for tool, arguments in calls:
        inner = "".join(f"{NS}<{k}>{raw(v)}{NS}</{k}>" for k, v in arguments.items())
        given += f'{NS}<invoke name="{tool.name}">{inner}{NS}</invoke>\n'
    block = f"{NS}<tool_call>\n{given}{NS}</tool_call>" if given else ""
    return f"<mm:think>{reasoning}</mm:think>{text}{block}[e~["
