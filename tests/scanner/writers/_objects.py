"""Calls as JSON objects, as many families write them between their own markers."""

from __future__ import annotations

import json

from tests.scanner.writers import Calls


def objects(calls: Calls, name: str = "name", arguments: str = "arguments") -> list[str]:
    return [json.dumps({name: tool.name, arguments: given}, ensure_ascii=False) for tool, given in calls]


def listed(calls: Calls, name: str = "name", arguments: str = "arguments") -> str:
    return f"[{', '.join(objects(calls, name, arguments))}]"


def thought(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
