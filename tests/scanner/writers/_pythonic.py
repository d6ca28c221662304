"""Python calls, as `repr` writes their values."""

from __future__ import annotations

from tests.scanner.writers import Calls


def listed(calls: Calls) -> str:
    given = (f"{tool.name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for tool, arguments in calls)
    return f"[{', '.join(given)}]" if calls else ""
