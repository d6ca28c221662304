"""How each family writes a turn: one module a format, `write(reasoning, text, calls) -> str`.

The modules are found by their names; `written` is what the properties test asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from modelyard.core.request import Tool

Calls = Sequence[tuple[Tool, dict[str, Any]]]
Write = Callable[[str, str, Calls], str]


class Unwritable(Exception):
    """These values cannot be written in this format."""


def written() -> dict[str, Write]:
    """Every writer by the id of its format; a name with an underscore in front is shared code."""
    stems = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    return {stem: import_module(f"{__name__}.{stem}").write for stem in stems}


def raw(value: Any) -> str:
    """A value as the families with tags write it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
