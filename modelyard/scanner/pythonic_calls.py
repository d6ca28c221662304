"""Calls written as Python: `[get_weather(city="Paris"), now()]`, one or several, in a list or one a line.

Arguments become JSON as they come. Values are Python's literals or JSON's. Arguments without a name get the names of
the tool's properties, in their order; where nobody knows these, such a call is unreadable. It does not take the others
of its list with it: what can be read of them counts.
"""

from __future__ import annotations

import re
from functools import partial

from modelyard.scanner.calls import Calls
from modelyard.scanner.lexer import BRACKET, SURROGATES, Steps, Tape, Unoffered, Unreadable
from modelyard.scanner.repair import SET, JsonValue, key_of, mended
from modelyard.scanner.typed import TypedArguments, quoted

_NAME = re.compile(r"[\w.-]*")
_BETWEEN = (",", ";")
_QUOTES = ("'", '"')
_BRACKETS = ("", "{", "[", "}", ",")
_WORD_LIMIT = 512
_GAP = 64
_ARGUMENTS_FOLLOW = re.compile(r"\s*(?:\)|[^\W\d]\w*\s*=(?!=))")
_AFTER_VALUE = frozenset({"", ",", ")", "]", "}", ":", "<"})
_PADDING = re.compile(r"^(-?)0+(?=[1-9])")
_LITERAL = re.compile(rf"[^\s,:=()\[\]{{}}\"'<{SURROGATES}]*")
_PLAIN = re.compile(rf'[^"\\\x00-\x1f\'{SURROGATES}]*')
_ESCAPED = {"\n": "", "'": "'", "a": "\\u0007", "v": "\\u000b"}
_HEX_DIGITS = {"x": 2, "U": 8}
_SAME_IN_JSON = '"\\bfnrt'


def pythonic_calls(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After a family's marker: calls in brackets, or without."""
    yield from tape.space()
    if (yield from tape.peek()) == "[":
        tape.skip(1)
    return (yield from listed_calls(tape, calls))


def listed_calls(tape: Tape, calls: Calls, *, strict: bool = False) -> Steps[str | None]:
    """After the opening bracket. Where that is all there is (`strict`), a tool that nobody offered is just text."""
    with BRACKET:
        return (yield from _members(tape, calls, strict))


def _members(tape: Tape, calls: Calls, strict: bool, read: int = 0) -> Steps[str | None]:
    while True:
        yield from tape.space()
        char = yield from tape.peek()
        if read and char == "]":
            tape.skip(1)
            return None
        if read and char and char in _BETWEEN:
            tape.skip(1)
        elif not (char.isalpha() or char == "_"):
            if not read:
                raise Unreadable("no call stands here")
            return None
        else:
            yield from _member(tape, calls, strict)
            read += 1


def _member(tape: Tape, calls: Calls, strict: bool) -> Steps[None]:
    try:
        yield from _call(tape, calls, strict)
    except Unreadable as error:
        if error.depth:
            error.inner, error.further = error.depth, partial(_further, strict=strict)
        raise


def _further(tape: Tape, calls: Calls, *, strict: bool) -> Steps[str | None]:
    """After a call that was none: others may follow, else this is just the rest of a text."""
    space = yield from tape.space()
    if (yield from tape.peek()) in _BETWEEN:
        tape.skip(1)
    elif "\n" not in space:
        raise Unreadable("no further call stands here")
    with BRACKET:
        return (yield from _members(tape, calls, strict))


def _call(tape: Tape, calls: Calls, strict: bool) -> Steps[None]:
    name = yield from _word(tape, _NAME)
    if (yield from tape.peek()) != "(":
        raise Unreadable("a name without brackets")
    tape.skip(1)
    calls.name(name)
    with BRACKET:
        if strict and not calls.is_known:
            raise Unoffered(name, _ARGUMENTS_FOLLOW)
        yield from _Arguments(tape, calls).read()


def call_arguments(tape: Tape, calls: Calls) -> Steps[None]:
    """After the bracket that follows a name."""
    with BRACKET:
        yield from _Arguments(tape, calls).read()


def _word(tape: Tape, pattern: re.Pattern[str]) -> Steps[str]:
    taken = ""
    while True:
        found = pattern.match(tape.text, tape.at)
        taken += tape.take(found.end() if found else tape.at)
        if len(taken) > _WORD_LIMIT:
            raise Unreadable("too long for a name or a number")
        if not tape.is_empty or tape.ended:
            return taken
        yield


class _Arguments:
    def __init__(self, tape: Tape, calls: Calls) -> None:
        self._tape, self._calls = tape, calls
        self._names = list(TypedArguments(calls).properties)
        self._count = 0

    def read(self) -> Steps[None]:
        tape = self._tape
        while True:
            yield from tape.space()
            char = yield from tape.peek()
            if char in ("", "<", ")") or char in tape.special:
                return self._close(char)
            if char == ",":
                tape.skip(1)
            else:
                yield from self._argument(char)

    def _close(self, char: str) -> None:
        if char == ")":
            self._tape.skip(1)
        elif self._tape.cut and not char:
            raise Unreadable("cut off inside a call")
        self._calls.put("}" if self._count else "{}")
        self._calls.close()

    def _argument(self, char: str) -> Steps[None]:
        if not (char.isalpha() or char == "_"):
            self._begin(self._nth())
            yield from PythonValue(self._tape, self._calls.put).read()
            return
        word = yield from _word(self._tape, _NAME)
        yield from self._tape.space()
        if (yield from self._tape.peek()) == "=":
            self._tape.skip(1)
            yield from self._tape.space()
            self._begin(word)
            yield from PythonValue(self._tape, self._calls.put).read()
        else:
            value = mended(word)
            self._begin(self._nth())
            self._calls.put(value)

    def _nth(self) -> str:
        if self._count >= len(self._names):
            raise Unreadable("an argument without a name")
        return self._names[self._count]

    def _begin(self, name: str) -> None:
        self._calls.put(f'{", " if self._count else "{"}"{quoted(name)}": ')
        self._count += 1


class PythonValue(JsonValue):
    """Python's literals, which are almost JSON's: other escapes, and strings between three quotes."""

    def _literal(self) -> Steps[str]:
        """Numbers may be padded (`month=07`), which neither language allows."""
        return _PADDING.sub(r"\1", (yield from _word(self._tape, _LITERAL)))

    def _string(self, quote: str) -> Steps[None]:
        if (yield from self._tape.stands((quote * 3,))):
            yield from self._block(quote * 3)
        else:
            yield from super()._string(quote)

    def _open(self, bracket: str) -> Steps[None]:
        """A dictionary begins like a set: only what follows the first member tells."""
        space = yield from self._tape.space()
        char = yield from self._tape.peek()
        if bracket == "[" or char in _BRACKETS:
            yield from super()._open(bracket)
            self._put(space)
            return
        self._stack.append(bracket)
        first = yield from self._first_member(char)
        after = yield from self._tape.space()
        if (yield from self._tape.peek()) == ":":
            self._put(f"{bracket}{space}{first if char in _QUOTES else key_of(first)}{after}")
            yield from self.colon()
            yield from self._value()
        else:
            self._put(f"[{space}{first if char in _QUOTES else mended(first)}{after}")
            self._stack[-1], self._first = SET, False

    def _first_member(self, char: str) -> Steps[str]:
        if char not in _QUOTES:
            return (yield from self._literal())
        parts: list[str] = []
        yield from PythonValue(self._tape, parts.append)._string(char)
        return "".join(parts)

    def _closes(self) -> Steps[bool]:
        """Commands for a shell hold quotes that nobody escaped (`'sed -n '1,9p' f.py'`): the last one is the one that
        is followed by what can follow a value, and behind its brackets by no other quote."""
        closed = False
        for offset in range(1, _GAP):
            char = (yield from self._tape.ahead(offset + 1))[offset:]
            if closed and (not char or char not in ")]}"):
                return char not in _QUOTES
            if not char.isspace():
                closed = bool(char) and char in ")]}"
                if not closed:
                    return char in _AFTER_VALUE or char in self._tape.special
        return True

    def _block(self, quotes: str) -> Steps[None]:
        tape = self._tape
        tape.skip(3)
        self._put('"')
        while not (yield from tape.stands((quotes,))):
            char = yield from tape.peek()
            found = _PLAIN.match(tape.text, tape.at)
            if found and found.end() > tape.at:
                self._put(tape.take(found.end()))
            elif char == "\\":
                yield from self._escape()
            elif not char or char in tape.special:
                raise Unreadable("a string without an end")
            else:
                self._put(quoted(tape.skip(1)))
        tape.skip(3)
        self._put('"')

    def _escape(self) -> Steps[None]:
        two = yield from self._tape.ahead(2)
        kind = two[1:]
        if kind == "u":
            yield from self._unicode()
        elif kind in _HEX_DIGITS:
            yield from self._code(_HEX_DIGITS[kind])
        elif kind and (kind in _SAME_IN_JSON or kind in _ESCAPED):
            self._tape.skip(2)
            self._put(_ESCAPED.get(kind, two))
        elif kind:  # a backslash that escapes nothing is one
            self._tape.skip(1)
            self._put("\\\\")
        else:
            raise Unreadable("a string without an end")

    def _code(self, digits: int) -> Steps[None]:
        """A character by its number."""
        text = (yield from self._tape.ahead(2 + digits))[2:]
        if len(text) == digits and all(c in "0123456789abcdefABCDEF" for c in text) and int(text, 16) < 0x110000:
            self._tape.skip(2 + digits)
            self._put(quoted(chr(int(text, 16))))
        else:
            self._tape.skip(1)
            self._put("\\\\")
