"""The arguments of a tool call in protocols that send them as a JSON object instead of as text."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from modelyard.protocols.common.json import is_json_object

FREE_TEXT = "input"  # the field that holds arguments which are no JSON object


def write_arguments(text: str) -> Any:
    """The text itself where it is an object: to write it again would change the form of its numbers. It gets one line,
    as streams of lines need it."""
    stripped = text.strip()
    if is_json_object(stripped):
        whole = stripped.encode()
        return Raw(msgspec.json.format(whole, indent=-1) if b"\n" in whole or b"\r" in whole else whole)
    return {FREE_TEXT: text} if stripped else {}


def read_arguments(value: Raw) -> str:
    """The text of the object. Some clients send a string that holds it."""
    text = bytes(value).decode()
    if text.startswith('"'):
        return str(msgspec.json.decode(text))
    return "" if text in ("", "null") else text


class CallNumbers:
    """Ids for calls and results that a client sends without any.

    The n-th call of a conversation gets the same id on every turn. A result belongs to the first call of its name that
    has no result yet, or else to the first such call of any name.
    """

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # id and name of the calls without a result

    def call(self, name: str, call_id: str | None) -> str:
        self._count += 1
        found = call_id or f"call_{self._count}"
        self._open.append((found, name))
        return found

    def result(self, name: str, call_id: str | None) -> str:
        if call_id:
            self._open = [entry for entry in self._open if entry[0] != call_id]
            return call_id
        entry = next((entry for entry in self._open if entry[1] == name), None) or next(iter(self._open), None)
        if entry is None:
            return f"call_{name}" if name else "call_unknown"
        self._open.remove(entry)
        return entry[0]
