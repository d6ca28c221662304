"""Keys and values in tags that all have one suffix."""

from __future__ import annotations

from typing import Any

from tests.scanner.writers import Calls, raw


def turn(reasoning: str, text: str, calls: Calls, suffix: str) -> str:
    given = "".join(_call(tool.name, arguments, suffix) for tool, arguments in calls)
    block = f"<tool_calls{suffix}>\n{given}</tool_calls{suffix}>" if calls else ""
    return f"<think{suffix}>{reasoning}</think{suffix}>{text}{block}<｜hy_eos{suffix}｜>"


def _call(name: str, arguments: dict[str, Any], suffix: str) -> str:
    given = "".join(
        f"<arg_key{suffix}>{k}</arg_key{suffix}>\n<arg_value{suffix}>{raw(v)}</arg_value{suffix}>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{given}</tool_call{suffix}>\n"
