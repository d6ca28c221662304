"""Calls as JSON objects: `{"name": …, "arguments": {…}}`, one or several, in a list or not.

Arguments that follow the name are streamed. Arguments before the name wait for it. Also read are `tool_name` for
`name`, `parameters` or `args` for `arguments`, arguments as a string of JSON, and the OpenAI shape `{"type":
"function", "function": {…}}`.

`bare_…` readers are for JSON without a marker, which follows a bare marker: a bracket or a code fence. It is a call
only if it names an offered tool and has arguments. Everything else is shown as text, unchanged. Arguments after the
name of another tool cause a warning.
"""

from __future__ import annotations

import re

import msgspec

from modelyard.scanner.lenient_json import JsonReader, repair_json
from modelyard.scanner.lexer import INSIDE_BRACKET, Incremental, ParseError, TextBuffer, UnknownTool
from modelyard.scanner.output import CallBuilder

_NAME_KEYS = frozenset({"name", "function", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args"})
_CALL_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"tool_calls", "id", "type", "tool_call_id", "thought"}
_EMPTY = frozenset({"null", "[]", '""'})
_ARGUMENTS_FOLLOW = re.compile(r"""\s*,\s*["']?(?:arguments|parameters|args)["']?\s*:""")
_NO_EVIDENCE_NEEDED = re.compile("")
_FENCE = "```"


def json_calls(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    count, in_list = 0, False
    while True:
        yield from buffer.skip_space()
        char = yield from buffer.peek()
        if char == "{":
            yield from JsonCallReader(buffer, calls).read()
            count += 1
        elif char == "[" and not count and not in_list:
            buffer.skip(1)
            in_list = True
        elif count and char and char in ",]}":  # of a list, or one bracket too many
            buffer.skip(1)
        elif count:
            return None
        else:
            raise ParseError("expected a call")


def json_arguments(buffer: TextBuffer, calls: CallBuilder) -> Incremental[None]:
    """The arguments of a call whose name is already known."""
    yield from buffer.skip_space()
    if (yield from buffer.peek()) != "{":
        raise ParseError("the arguments are not an object")
    yield from JsonReader(buffer, calls.append).read()
    calls.finish()


class JsonCallReader:
    def __init__(self, buffer: TextBuffer, calls: CallBuilder) -> None:
        self._buffer, self._calls = buffer, calls
        self._arguments_first: str | None = None  # arguments that came before the name
        self._is_finished = self._is_closed = False

    def read(self) -> Incremental[None]:
        self._buffer.skip(1)
        yield from self.read_opened()

    def read_opened(self) -> Incremental[None]:
        """After the opening bracket."""
        with INSIDE_BRACKET:
            yield from self._members()
        if not self._is_finished:
            self._finish_without_arguments()
        self._buffer.commit()  # the closing bracket belongs to the call

    def _finish_without_arguments(self) -> None:
        is_over = self._buffer.ended and self._buffer.is_empty and not self._is_closed
        if not self._calls.is_open or (is_over and self._arguments_first is None):
            raise ParseError("the object names no call, or the output ends inside of it")
        self._calls.finish(self._arguments_first or "{}")

    def _members(self) -> Incremental[None]:
        while True:
            yield from self._buffer.skip_space()
            char = yield from self._buffer.peek()
            if char == ",":
                self._buffer.skip(1)
            elif char == "}":
                self._buffer.skip(1)
                self._is_closed = True
                return
            elif char in "<{[]" or char in self._buffer.token_codes:
                return  # the closing bracket is missing
            else:
                yield from self._member((yield from self._key()))

    def _key(self) -> Incremental[str]:
        parts: list[str] = []
        reader = JsonReader(self._buffer, parts.append)
        yield from reader.key()
        key = str(msgspec.json.decode("".join(parts)))
        yield from reader.colon()
        yield from self._buffer.skip_space()
        return key

    def _member(self, key: str) -> Incremental[None]:
        char = yield from self._buffer.peek()
        if key == "function" and char == "{" and not self._is_finished:
            self._buffer.skip(1)
            with INSIDE_BRACKET:
                yield from self._members()
        elif key in _NAME_KEYS and not self._is_finished:
            self._name(msgspec.json.decode((yield from self._complete_value())))
        elif key in _ARGUMENT_KEYS and not self._is_finished:
            yield from self._arguments(char)
        else:
            yield from self._complete_value()

    def _name(self, name: object) -> None:
        if not isinstance(name, str):
            raise ParseError("the name is not a string")
        self._calls.start(name.strip())
        if self._arguments_first is not None:
            self._finish(self._arguments_first)

    def _arguments(self, char: str) -> Incremental[None]:
        if char == "{" and self._calls.is_open:
            yield from JsonReader(self._buffer, self._calls.append).read()
            self._finish()
            return
        arguments = _as_object((yield from self._complete_value()))
        if self._calls.is_open:
            self._finish(arguments)
        else:
            self._arguments_first = arguments

    def _finish(self, arguments: str = "") -> None:
        self._calls.finish(arguments)
        self._is_finished = True

    def _complete_value(self) -> Incremental[str]:
        parts: list[str] = []
        yield from JsonReader(self._buffer, parts.append).read()
        return "".join(parts)


def _as_object(value: str) -> str:
    """Arguments as an object: given as one, empty, or as a string of JSON."""
    if value.startswith('"') and value not in _EMPTY:
        value = repair_json(str(msgspec.json.decode(value)).strip()) or ""
    if value in _EMPTY:
        return "{}"
    if not value.startswith("{"):
        raise ParseError("the arguments are not an object")
    return value


class OfferedJsonCallReader(JsonCallReader):
    """Reads only calls of offered tools, and objects that list their calls under `tool_calls`."""

    def _name(self, name: object) -> None:
        if isinstance(name, str):
            self._calls.start(name.strip())
            if not self._calls.is_offered:
                has_arguments = self._arguments_first is not None
                raise UnknownTool(name.strip(), _NO_EVIDENCE_NEEDED if has_arguments else _ARGUMENTS_FOLLOW)
        super()._name(name)

    def _finish_without_arguments(self) -> None:
        raise ParseError("JSON, but not a call")

    def _member(self, key: str) -> Incremental[None]:
        if self._is_finished:
            yield from super()._member(key)
        elif key not in _CALL_KEYS:
            raise ParseError("JSON, but not a call")  # at once: text must not be held back
        elif key == "tool_calls" and (yield from self._buffer.peek()) == "[":
            self._buffer.skip(1)
            yield from bare_list(self._buffer, self._calls)
            self._is_finished = True
        else:
            yield from super()._member(key)


def marked_list(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After a marker without a closing counterpart: the calls end with their list."""
    yield from buffer.skip_space()
    if (yield from buffer.peek()) != "[":
        return (yield from json_calls(buffer, calls))
    buffer.skip(1)
    return (yield from bare_list(buffer, calls, JsonCallReader))


def bare_list(
    buffer: TextBuffer, calls: CallBuilder, reader: type[JsonCallReader] = OfferedJsonCallReader
) -> Incremental[str | None]:
    """After `[`."""
    with INSIDE_BRACKET:
        has_calls = False
        while True:
            yield from buffer.skip_space()
            char = yield from buffer.peek()
            if char == "{":
                yield from reader(buffer, calls).read()
                has_calls = True
            elif not has_calls:
                raise ParseError("expected a call")
            elif char == ",":
                buffer.skip(1)
            else:
                buffer.skip(1 if char == "]" else 0)
                return None


def bare_object(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `{`."""
    yield from OfferedJsonCallReader(buffer, calls).read_opened()
    return None


def bare_fence(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After three backticks: a code block that contains only calls."""
    yield from buffer.skip_if("json")
    yield from buffer.skip_space()
    char = yield from buffer.peek()
    if char not in ("[", "{"):
        raise ParseError("code, but not a call")
    buffer.skip(1)
    yield from (bare_list if char == "[" else bare_object)(buffer, calls)
    yield from buffer.skip_space()
    yield from buffer.skip_if(_FENCE)
    return None
