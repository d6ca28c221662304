"""Calls written as JSON objects: `{"name": …, "arguments": {…}}`, one or several, in a list or not.

Arguments that follow the name are passed on as they come; those that stand before it wait for it. Also read are
`tool_name` for `name`, `parameters` or `args` for `arguments`, arguments written as a string of JSON, and the OpenAI
shape `{"type": "function", "function": {…}}`.
"""

from __future__ import annotations

import msgspec

from modelyard.scanner.calls import Calls
from modelyard.scanner.lexer import BRACKET, Steps, Tape, Unreadable
from modelyard.scanner.repair import JsonValue, mend

_NAMES = frozenset({"name", "function", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args"})
_EMPTY = frozenset({"null", "[]", '""'})


def json_calls(tape: Tape, calls: Calls) -> Steps[str | None]:
    read, listed = 0, False
    while True:
        yield from tape.space()
        char = yield from tape.peek()
        if char == "{":
            yield from JsonCall(tape, calls).read()
            read += 1
        elif char == "[" and not read and not listed:
            tape.skip(1)
            listed = True
        elif read and char and char in ",]}":  # a list's, or one bracket too many
            tape.skip(1)
        elif read:
            return None
        else:
            raise Unreadable("no call stands here")


def json_arguments(tape: Tape, calls: Calls) -> Steps[None]:
    """The bare arguments of a call whose name stood elsewhere."""
    yield from tape.space()
    if (yield from tape.peek()) != "{":
        raise Unreadable("arguments are an object")
    yield from JsonValue(tape, calls.put).read()
    calls.close()


class JsonCall:
    def __init__(self, tape: Tape, calls: Calls) -> None:
        self._tape, self._calls = tape, calls
        self._waiting: str | None = None  # arguments that came before the name
        self._closed = False

    def read(self) -> Steps[None]:
        self._tape.skip(1)
        yield from self.opened()

    def opened(self) -> Steps[None]:
        """After the opening bracket."""
        with BRACKET:
            yield from self._members()
        if not self._closed:
            self._settle()
        self._tape.kept = []  # the call's own bracket is no part of what may have to be given back

    def _settle(self) -> None:
        """The object is over: a call without arguments has none."""
        if not self._calls.is_open or (self._tape.ended and self._tape.cut and self._waiting is None):
            raise Unreadable("the object names no call")
        self._calls.put(self._waiting or "{}")
        self._calls.close()

    def _members(self) -> Steps[None]:
        while True:
            yield from self._tape.space()
            char = yield from self._tape.peek()
            if char == ",":
                self._tape.skip(1)
            elif char == "}":
                self._tape.skip(1)
                return
            elif char in "<{[]" or char in self._tape.special:
                return  # the bracket is missing; what stands here is somebody else's
            else:
                yield from self._member((yield from self._key()))

    def _key(self) -> Steps[str]:
        parts: list[str] = []
        yield from JsonValue(self._tape, parts.append).key()
        yield from JsonValue(self._tape, _drop).colon()
        yield from self._tape.space()
        return str(msgspec.json.decode("".join(parts)))

    def _member(self, key: str) -> Steps[None]:
        char = yield from self._tape.peek()
        if self._closed:
            yield from JsonValue(self._tape, _drop).read()
        elif key == "function" and char == "{":
            self._tape.skip(1)
            with BRACKET:
                yield from self._members()
        elif key in _NAMES:
            self._name(msgspec.json.decode((yield from self._whole())))
        elif key in _ARGUMENTS:
            yield from self._arguments(char)
        else:
            yield from JsonValue(self._tape, _drop).read()

    def _name(self, name: object) -> None:
        if not isinstance(name, str):
            raise Unreadable("a name is a string")
        self._calls.name(name.strip())
        if self._waiting is not None:
            self._close(self._waiting)

    def _arguments(self, char: str) -> Steps[None]:
        if char == "{" and self._calls.is_open:
            yield from JsonValue(self._tape, self._calls.put).read()
            self._calls.close()
            self._closed = True
            return
        arguments = _object((yield from self._whole()))
        if self._calls.is_open:
            self._close(arguments)
        else:
            self._waiting = arguments

    def _close(self, arguments: str) -> None:
        self._calls.put(arguments)
        self._calls.close()
        self._closed = True

    def _whole(self) -> Steps[str]:
        parts: list[str] = []
        yield from JsonValue(self._tape, parts.append).read()
        return "".join(parts)


def _object(value: str) -> str:
    """Arguments as the object that they must be: spelled out, empty, or written as a string of JSON."""
    if value.startswith('"') and value not in _EMPTY:
        value = mend(str(msgspec.json.decode(value)).strip()) or ""
    if value in _EMPTY:
        return "{}"
    if not value.startswith("{"):
        raise Unreadable("arguments are an object")
    return value


def _drop(text: str) -> None:
    """Members that no client asks for."""
