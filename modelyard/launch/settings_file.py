"""Adds settings to an editor's settings file: JSON with comments and trailing commas, which stay as they are.

Nothing that is there is changed: an object gets the members that it lacks, a list the items that it lacks, and
anything else that is there stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

_TOKEN = re.compile(
    r"(?P<blank>\s+|//[^\n]*|/\*.*?\*/)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")'
    r"|(?P<mark>[\[\]{},:])"
    r"|(?P<word>[^\s\[\]{},:\"/]+)",
    re.DOTALL,
)
_INDENT = "  "


class _Node(Struct):
    """A value in the text. `inside` is the position behind the opening bracket of an object or a list."""

    value: Any
    inside: int = -1
    members: dict[str, _Node] = field(default_factory=dict)


def add_settings(text: str, settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The text with the settings that it lacks, and the names of those for which it has another value. Raises
    ValueError if the text is not an object."""
    root = _Parser(text if text.strip() else "{}").document()
    if not isinstance(root.value, dict):
        raise ValueError("the file does not hold an object")
    insertions: dict[int, str] = {}
    kept: list[str] = []
    _merge(root, settings, (), insertions, kept)
    new = text if text.strip() else "{}"
    for at, added in sorted(insertions.items(), reverse=True):
        new = new[:at] + added + new[at:]
    return (new if new.endswith("\n") or not insertions else new + "\n"), kept


def _merge(
    node: _Node, wanted: Mapping[str, Any], path: tuple[str, ...], insertions: dict[int, str], kept: list[str]
) -> None:
    missing = [
        f"{json.dumps(name)}: {_dump(value, len(path) + 1)}" for name, value in wanted.items() if name not in node.value
    ]
    if missing:
        insertions[node.inside] = _inserted(missing, bool(node.value), len(path))
    for name, value in wanted.items():
        if name not in node.value:
            continue
        found, here = node.members[name], (*path, name)
        if isinstance(value, Mapping) and isinstance(found.value, dict):
            _merge(found, value, here, insertions, kept)
        elif isinstance(value, list) and isinstance(found.value, list):
            new = [_dump(item, len(here) + 1) for item in value if not _has(found.value, item)]
            if new:
                insertions[found.inside] = _inserted(new, bool(found.value), len(here))
        elif found.value != value:
            kept.append(".".join(here))


def _has(items: list[Any], wanted: Any) -> bool:
    """Items with a name are the same if their names are."""
    if isinstance(wanted, Mapping) and "name" in wanted:
        return any(isinstance(item, dict) and item.get("name") == wanted["name"] for item in items)
    return wanted in items


def _inserted(entries: list[str], is_first_of_more: bool, depth: int) -> str:
    lines = ",".join(f"\n{_INDENT * (depth + 1)}{entry}" for entry in entries)
    return f"{lines}," if is_first_of_more else f"{lines}\n{_INDENT * depth}"


def _dump(value: Any, depth: int) -> str:
    return json.dumps(value, indent=len(_INDENT)).replace("\n", f"\n{_INDENT * depth}")


class _Parser:
    def __init__(self, text: str) -> None:
        self._words = self._split(text)
        self._word, self._at = next(self._words)

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, int]]:
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"unexpected {text[at]!r} in line {text.count(chr(10), 0, at) + 1}")
            if found.lastgroup != "blank":
                yield found.group(), at
            at = found.end()
        yield "", at

    def document(self) -> _Node:
        node = self._value()
        if self._word:
            raise ValueError(f"unexpected {self._word[:20]!r} after the end")
        return node

    def _next(self) -> str:
        word = self._word
        if not word:
            raise ValueError("the text ends too early")
        self._word, self._at = next(self._words)
        return word

    def _expect(self, mark: str) -> None:
        if (word := self._next()) != mark:
            raise ValueError(f"unexpected {word[:20]!r} instead of {mark!r}")

    def _value(self) -> _Node:
        inside = self._at + 1
        word = self._next()
        if word == "{":
            members = dict(self._members())
            return _Node({name: member.value for name, member in members.items()}, inside, members)
        if word == "[":
            return _Node([item.value for item in self._items("]")], inside)
        return _Node(json.loads(word))

    def _members(self) -> Iterator[tuple[str, _Node]]:
        while self._word != "}":
            if not (name := self._next()).startswith('"'):
                raise ValueError(f"unexpected {name[:20]!r} instead of a name")
            self._expect(":")
            yield json.loads(name), self._value()
            if self._word != "}":
                self._expect(",")
        self._next()

    def _items(self, end: str) -> Iterator[_Node]:
        while self._word != end:
            yield self._value()
            if self._word != end:
                self._expect(",")
        self._next()
