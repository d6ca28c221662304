"""Calls as Python: `[get_weather(city="Paris"), now()]`, one or several, in a list or one per line.

Arguments become JSON as they arrive. Values are literals of Python or JSON. Arguments without a name get the names of
the tool's properties, in their order. Without known properties such a call is a ParseError. It does not affect the
other calls of its list.
"""

from __future__ import annotations

import re
from functools import partial

from modelyard.scanner.arguments import ArgumentWriter
from modelyard.scanner.lenient_json import SET, JsonReader, escape_json, quote_key, repair_literal
from modelyard.scanner.lexer import INSIDE_BRACKET, SURROGATES, Incremental, ParseError, TextBuffer, UnknownTool
from modelyard.scanner.output import CallBuilder

_NAME = re.compile(r"[\w.-]*")
_SEPARATORS = (",", ";")
_QUOTES = ("'", '"')
_WORD_LIMIT = 512  # characters of a name or number
_SPACE_LIMIT = 64
_ARGUMENTS_FOLLOW = re.compile(r"\s*(?:\)|[^\W\d]\w*\s*=(?!=))")
_AFTER_VALUE = frozenset({"", ",", ")", "]", "}", ":", "<"})
_PADDING = re.compile(r"^(-?)0+(?=[1-9])")
_LITERAL = re.compile(rf"[^\s,:=()\[\]{{}}\"'<{SURROGATES}]*")
_PLAIN = re.compile(rf'[^"\\\x00-\x1f\'{SURROGATES}]*')
_ESCAPES = {"\n": "", "'": "'", "a": "\\u0007", "v": "\\u000b"}
_HEX_DIGITS = {"x": 2, "U": 8}
_JSON_ESCAPES = '"\\bfnrt'


def pythonic_calls(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After a family's marker: calls with or without brackets around them."""
    yield from buffer.skip_space()
    yield from buffer.skip_if("[")
    return (yield from pythonic_list(buffer, calls))


def pythonic_list(buffer: TextBuffer, calls: CallBuilder, *, offered_only: bool = False) -> Incremental[str | None]:
    """After the opening bracket. `offered_only`: without markers, a call of a tool that is not offered is text."""
    with INSIDE_BRACKET:
        return (yield from _read_list(buffer, calls, offered_only))


def _read_list(buffer: TextBuffer, calls: CallBuilder, offered_only: bool) -> Incremental[str | None]:
    count = 0
    while True:
        yield from buffer.skip_space()
        char = yield from buffer.peek()
        if count and char == "]":
            buffer.skip(1)
            return None
        if count and char in _SEPARATORS:
            buffer.skip(1)
        elif char.isalpha() or char == "_":
            try:
                yield from _read_call(buffer, calls, offered_only)
            except ParseError as error:
                if error.depth:
                    error.member_depth = error.depth
                    error.read_rest = partial(_read_list_rest, offered_only=offered_only)
                raise
            count += 1
        elif count:
            return None
        else:
            raise ParseError("expected a call")


def _read_list_rest(buffer: TextBuffer, calls: CallBuilder, *, offered_only: bool) -> Incremental[str | None]:
    """After a broken call: others may follow. Otherwise this is the rest of a text."""
    space = yield from buffer.skip_space()
    if (yield from buffer.peek()) in _SEPARATORS:
        buffer.skip(1)
    elif "\n" not in space:
        raise ParseError("expected another call")
    return (yield from pythonic_list(buffer, calls, offered_only=offered_only))


def _read_call(buffer: TextBuffer, calls: CallBuilder, offered_only: bool) -> Incremental[None]:
    name = yield from buffer.read_run(_NAME, _WORD_LIMIT)
    if (yield from buffer.peek()) != "(":
        raise ParseError("a name without brackets")
    buffer.skip(1)
    calls.start(name)
    with INSIDE_BRACKET:
        if offered_only and not calls.is_offered:
            raise UnknownTool(name, _ARGUMENTS_FOLLOW)
        yield from _ArgumentsReader(buffer, calls).read()


def pythonic_arguments(buffer: TextBuffer, calls: CallBuilder) -> Incremental[None]:
    """After the bracket that follows a name."""
    with INSIDE_BRACKET:
        yield from _ArgumentsReader(buffer, calls).read()


class _ArgumentsReader:
    def __init__(self, buffer: TextBuffer, calls: CallBuilder) -> None:
        self._buffer, self._calls = buffer, calls
        self._names = list(ArgumentWriter(calls).properties)
        self._count = 0

    def read(self) -> Incremental[None]:
        buffer = self._buffer
        while True:
            yield from buffer.skip_space()
            char = yield from buffer.peek()
            if char == ",":
                buffer.skip(1)
            elif char in ("", "<", ")") or char in buffer.token_codes:
                break
            else:
                yield from self._argument(char)
        if char == ")":
            buffer.skip(1)
        elif not char:
            raise ParseError("the output ends inside a call")
        self._calls.finish("}" if self._count else "{}")

    def _argument(self, char: str) -> Incremental[None]:
        buffer = self._buffer
        if char.isalpha() or char == "_":
            word = yield from buffer.read_run(_NAME, _WORD_LIMIT)
            yield from buffer.skip_space()
            if (yield from buffer.peek()) != "=":
                value = repair_literal(word)
                self._begin(self._next_name())
                self._calls.append(value)
                return
            buffer.skip(1)
            yield from buffer.skip_space()
            self._begin(word)
        else:
            self._begin(self._next_name())
        yield from PythonLiteralReader(buffer, self._calls.append).read()

    def _next_name(self) -> str:
        if self._count >= len(self._names):
            raise ParseError("an argument without a name")
        return self._names[self._count]

    def _begin(self, name: str) -> None:
        self._calls.append(f'{", " if self._count else "{"}"{escape_json(name)}": ')
        self._count += 1


class PythonLiteralReader(JsonReader):
    """Python's literals: JSON with other escapes, sets, and strings between three quotes."""

    def _literal(self) -> Incremental[str]:
        """Numbers may be padded (`month=07`), which neither language allows."""
        return _PADDING.sub(r"\1", (yield from self._buffer.read_run(_LITERAL, _WORD_LIMIT)))

    def _string(self, quote: str) -> Incremental[None]:
        if (yield from self._buffer.match((quote * 3,))):
            yield from self._triple_quoted(quote * 3)
        else:
            yield from super()._string(quote)

    def _open(self, bracket: str) -> Incremental[None]:
        """A dictionary begins like a set. What follows the first member decides."""
        space = self._buffer.without_foreign((yield from self._buffer.skip_space()))
        char = yield from self._buffer.peek()
        if bracket == "[" or char in ("", "{", "[", "}", ","):
            yield from super()._open(bracket)
            self._emit(space)
            return
        self._stack.append(bracket)
        is_string = char in _QUOTES
        if is_string:
            parts: list[str] = []
            yield from PythonLiteralReader(self._buffer, parts.append).key()
            first = "".join(parts)
        else:
            first = yield from self._literal()
        after = self._buffer.without_foreign((yield from self._buffer.skip_space()))
        if (yield from self._buffer.peek()) == ":":
            self._emit(f"{bracket}{space}{first if is_string else quote_key(first)}{after}")
            yield from self.colon()
            yield from self._value()
        else:
            self._emit(f"[{space}{first if is_string else repair_literal(first)}{after}")
            self._stack[-1], self._is_first = SET, False

    def _is_closing_quote(self) -> Incremental[bool]:
        """Shell commands contain quotes without escapes (`'sed -n '1,9p' f.py'`).

        The closing quote is followed by what can follow a value, and after closing brackets by no other quote.
        """
        after_bracket = False
        for offset in range(1, _SPACE_LIMIT):
            char = (yield from self._buffer.lookahead(offset + 1))[offset:]
            if after_bracket and (not char or char not in ")]}"):
                return char not in _QUOTES
            if not char.isspace():
                after_bracket = bool(char) and char in ")]}"
                if not after_bracket:
                    return char in _AFTER_VALUE or char in self._buffer.token_codes
        return True

    def _triple_quoted(self, quotes: str) -> Incremental[None]:
        buffer = self._buffer
        buffer.skip(3)
        self._emit('"')
        while not (yield from buffer.match((quotes,))):
            char = yield from buffer.peek()
            if text := buffer.take_match(_PLAIN):
                self._emit(text)
            elif char == "\\":
                yield from self._escape()
            elif not char:
                raise ParseError("a string without an end")
            else:
                self._emit(escape_json((yield from self._quoted_token())))
        buffer.skip(3)
        self._emit('"')

    def _escape(self) -> Incremental[None]:
        two = yield from self._buffer.lookahead(2)
        kind = two[1:]
        if kind == "u":
            yield from self._unicode()
        elif kind in _HEX_DIGITS:
            yield from self._hex_escape(_HEX_DIGITS[kind])
        elif kind and (kind in _JSON_ESCAPES or kind in _ESCAPES):
            self._buffer.skip(2)
            self._emit(_ESCAPES.get(kind, two))
        elif kind:
            self._lone_backslash()
        else:
            self._buffer.skip(1)
            raise ParseError("a string without an end")

    def _hex_escape(self, digits: int) -> Incremental[None]:
        text = (yield from self._buffer.lookahead(2 + digits))[2:]
        if len(text) == digits and all(c in "0123456789abcdefABCDEF" for c in text) and int(text, 16) < 0x110000:
            self._buffer.skip(2 + digits)
            self._emit(escape_json(chr(int(text, 16))))
        else:
            self._lone_backslash()
