from __future__ import annotations

from typing import Any

from tests.scanner.writers import Calls, raw
from tests.scanner.writers._objects import thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    return "\n".join([thought(reasoning) + text, *(_call(tool.name, given) for tool, given in calls)]).rstrip()


def _call(name: str, given: dict[str, Any]) -> str:
    params = "".join(f'<param name="{k}">{_value(v)}</param>' for k, v in given.items())
    return f'<function name="{name}">{params}</function>'


def _value(value: Any) -> str:
    if isinstance(value, str) and any(c in value for c in "<&\n"):
        return f"<![CDATA[{value}]]>"
    return raw(value)
