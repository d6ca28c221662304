"""A short text that a regular expression matches."""

from __future__ import annotations

import importlib
import re
import string
from collections.abc import Iterable
from typing import Any

from modelyard.core.errors import InvalidRequest

_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_SPACE": " \t\n",
    "CATEGORY_WORD": string.ascii_letters + string.digits + "_",
    "CATEGORY_NOT_DIGIT": string.ascii_letters,
    "CATEGORY_NOT_SPACE": string.ascii_letters,
    "CATEGORY_NOT_WORD": " -",
}
_LONGEST = 100_000
_PLAIN = string.ascii_letters + string.digits + string.punctuation + " "


def sample(pattern: str) -> str:
    """The same parser as `re`'s own, so everything it understands has a meaning here; look-arounds are not searched."""
    try:
        parsed = importlib.import_module("re._parser").parse(pattern)
    except re.error as error:
        raise InvalidRequest(f"{pattern!r} is not a regular expression: {error}", code="invalid_regex") from None
    return _Sampler().text(parsed)


class _Sampler:
    def __init__(self) -> None:
        self._groups: dict[int, str] = {}

    def text(self, parsed: Iterable[tuple[Any, Any]]) -> str:
        return "".join(self._one(str(op), argument) for op, argument in parsed)

    def _one(self, op: str, argument: Any) -> str:
        if op == "LITERAL":
            return chr(argument)
        if op in ("IN", "ANY", "NOT_LITERAL"):
            return _letter(op, argument)
        if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, _, body = argument
            return self._times(self.text(body), least)
        if op == "SUBPATTERN":
            return self._group(argument[0], argument[-1])
        if op == "BRANCH":
            return self.text(argument[1][0])
        if op == "ATOMIC_GROUP":
            return self.text(argument)
        return self._groups.get(argument, "") if op == "GROUPREF" else ""

    def _times(self, text: str, times: int) -> str:
        if len(text) * times > _LONGEST:
            raise InvalidRequest("a match of the regular expression is too long to make up", code="invalid_regex")
        return text * times

    def _group(self, number: int | None, body: Any) -> str:
        text = self.text(body)
        if number is not None:
            self._groups[number] = text
        return text


def _letter(op: str, argument: Any) -> str:
    if op == "ANY":
        return "a"
    if op == "NOT_LITERAL":
        return next(c for c in _PLAIN if ord(c) != argument)
    if str(argument[0][0]) == "NEGATE":
        refused = {c for item in argument[1:] for c in _members(*item)}
        return next((c for c in _PLAIN if c not in refused), "\u00e9")
    return _members(*argument[0])[0]


def _members(op: Any, argument: Any) -> str:
    if str(op) == "LITERAL":
        return chr(argument)
    if str(op) == "RANGE":
        return "".join(map(chr, range(argument[0], min(argument[1], argument[0] + 0x100) + 1)))
    return _CATEGORIES.get(str(argument), "a")
