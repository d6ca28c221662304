"""Calls as bare JSON with nothing around them that says so, for `naked` markers: brackets and code fences.

Such JSON is a call only if it names a tool on offer and has arguments. Anything else is the text that it looks like,
down to the last character; arguments behind the name of another tool leave a warning.
"""

from __future__ import annotations

import re

from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import JsonCall, json_calls
from modelyard.scanner.lexer import BRACKET, Steps, Tape, Unoffered, Unreadable

_FENCE = "```"
_KEYS = frozenset({"name", "function", "tool_name", "arguments", "parameters", "args", "tool_calls"})
_BESIDE = frozenset({"id", "type", "tool_call_id", "thought"})
_ARGUMENTS_FOLLOW = re.compile(r"""\s*,\s*["']?(?:arguments|parameters|args)["']?\s*:""")
_NOTHING = re.compile("")


def open_list(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After a marker that has no counterpart: the calls end with their list."""
    yield from tape.space()
    if (yield from tape.peek()) != "[":
        return (yield from json_calls(tape, calls))
    tape.skip(1)
    return (yield from naked_list(tape, calls, JsonCall))


def naked_list(tape: Tape, calls: Calls, kind: type[JsonCall] | None = None) -> Steps[str | None]:
    """After `[`."""
    with BRACKET:
        return (yield from _members(tape, calls, kind or CertainCall))


def _members(tape: Tape, calls: Calls, kind: type[JsonCall]) -> Steps[str | None]:
    read = False
    while True:
        yield from tape.space()
        char = yield from tape.peek()
        if char == "{":
            yield from kind(tape, calls).read()
            read = True
        elif not read:
            raise Unreadable("no call stands here")
        elif char == ",":
            tape.skip(1)
        else:
            tape.skip(1 if char == "]" else 0)
            return None


def naked_object(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `{`."""
    yield from CertainCall(tape, calls).opened()
    return None


def fenced(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After three backticks: a block of code that holds nothing but calls."""
    if here := (yield from tape.stands(("json",))):
        tape.skip(len(here))
    yield from tape.space()
    char = yield from tape.peek()
    if char not in ("[", "{"):
        raise Unreadable("code, no calls")
    tape.skip(1)
    yield from (naked_list if char == "[" else naked_object)(tape, calls)
    yield from tape.space()
    if here := (yield from tape.stands((_FENCE,))):
        tape.skip(len(here))
    return None


class CertainCall(JsonCall):
    """Also an object that lists its calls under `tool_calls`."""

    def _name(self, name: object) -> None:
        if isinstance(name, str):
            self._calls.name(name.strip())
        if isinstance(name, str) and not self._calls.is_known:
            raise Unoffered(name.strip(), _NOTHING if self._waiting is not None else _ARGUMENTS_FOLLOW)
        super()._name(name)

    def _settle(self) -> None:
        raise Unreadable("JSON, but no call")

    def _member(self, key: str) -> Steps[None]:
        if key not in _KEYS and key not in _BESIDE and not self._closed:
            raise Unreadable("JSON, but no call")  # at once: what is just text should flow
        if key == "tool_calls" and not self._closed and (yield from self._tape.peek()) == "[":
            self._tape.skip(1)
            yield from naked_list(self._tape, self._calls)
            self._closed = True
        else:
            yield from super()._member(key)
