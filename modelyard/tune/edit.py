"""Changes written into a configuration's text: only the keys that change, everything else byte for byte. Pure.

TOML goes through tomlkit, which keeps comments and order. JSON is cut open at the value and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import tomlkit
from tomlkit.container import OutOfOrderTableProxy

from modelyard.core.errors import Conflict
from modelyard.core.knobs import Value

Path = tuple[str, ...]


def toml(text: str, changes: Mapping[Path, Any]) -> str:
    document = tomlkit.parse(text)
    for path, value in changes.items():
        table: Any = document
        for depth, key in enumerate(path[:-1]):
            table = _entered(table, key, path[: depth + 1], whole=depth == 0)
        table[path[-1]] = value
    return tomlkit.dumps(document)


def _entered(table: Any, key: str, path: Path, *, whole: bool) -> Any:
    """A section that is not there is made; the outermost has no head of its own, only its parts do."""
    if key not in table:
        table[key] = tomlkit.table(is_super_table=whole)
    inner = table[key]
    if not isinstance(inner, MutableMapping | OutOfOrderTableProxy):
        raise Conflict(f"{'.'.join(path)} is no section: {key} holds a value")
    return inner


def fragment(changes: Mapping[Path, Any]) -> str:
    return toml("", changes).strip()


# --- JSON -------------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


def json_text(text: str, changes: Mapping[Path, Any]) -> str:
    for path, value in changes.items():
        text = _put(text, path, value)
    return text


def _put(text: str, path: Path, value: Value) -> str:
    at = _skip(text, 0)
    for depth, key in enumerate(path):
        if text[at] != "{":
            raise Conflict(f"{'.'.join(path[:depth])} is no object")
        members = _members(text, at)
        if key not in members:
            rest: Any = value
            for inner in reversed(path[depth + 1 :]):
                rest = {inner: rest}
            return _inserted(text, at, members, key, rest)
        at = members[key][0]
    return text[:at] + json.dumps(value, ensure_ascii=False) + text[members[key][1] :]


def _members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """Where each value of the object that begins here starts and ends."""
    found: dict[str, tuple[int, int]] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)  # behind the colon
        _, end = _decoder.raw_decode(text, start)
        found[key] = (start, end)
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def _inserted(text: str, at: int, members: Mapping[str, tuple[int, int]], key: str, value: Any) -> str:
    """Behind the last member, on a line of its own where that one has one."""
    written = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
    if not members:
        return text[: at + 1] + written + text[_skip(text, at + 1) :]
    start, end = list(members.values())[-1]
    line = text[text.rfind("\n", 0, start) + 1 : start]
    own_line = "\n" in text[at:start] and line.lstrip().startswith('"')
    glue = ",\n" + line[: len(line) - len(line.lstrip())] if own_line else ", "
    return text[:end] + glue + written + text[end:]


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
