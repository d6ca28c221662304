"""Calls as Python."""

from __future__ import annotations

import json
from typing import Any

from modelyard.core.request import Tool


def call(tool: Tool, arguments: dict[str, Any]) -> str:
    given = (f"{k}={json.dumps(v) if isinstance(v, dict) else repr(v)}" for k, v in arguments.items())
    return f"{tool.name}({', '.join(given)})"
