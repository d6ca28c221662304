"""Gemma's own notation for calls, almost JSON: bare keys, and a token of its own in place of the quotes.

    call:get_weather{city:<|"|>Paris<|"|>,days:3,options:{exact:true,tags:[<|"|>a<|"|>]}}

Between two such tokens text stands as it is, without escapes. Keys, and the strings of careless models, may also be
quoted in JSON's way; a bare word is a string. Where only the first of two tokens was forgotten, the text ends at the
second, and may hold commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from modelyard.scanner.calls import Calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unoffered, Unreadable
from modelyard.scanner.repair import JsonValue, mended
from modelyard.scanner.typed import ANY, TypedArguments, convert, quoted
from modelyard.scanner.verbatim import verbatim

_CALL = "call:"
_OPENINGS = (_CALL, f":{_CALL}")  # some models repeat the colon before it
_NAME_END = re.compile(rf"[{{\n<{SURROGATES}]")
_IN_NAME = re.compile(r"[\w.-]")
_CERTAIN = re.compile("")
_QUOTED_END = re.compile('["\n]')
_KEY_END = re.compile(rf"[:,{{}}\[\]\n<{SURROGATES}]")
_BARE_END = re.compile(rf"[,{{}}\[\]<{SURROGATES}]")
_NAME_LIMIT = 256
_TEXT_LIMIT = 4096  # so long may a text be that begins without its quote
_DEPTH = 64
_BEFORE_TEXT = (":", ",", "[", "{")
_TEXT = frozenset({"string", *ANY})
_NOTHING = ("nil", "none", "None", "null")


class Notation:
    """One family's spelling: what stands for a quote, and what ends a call."""

    def __init__(self, quote: str, close: str) -> None:
        self._quote, self._close = quote, close

    def read(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After the token that opens calls: one or several."""
        yield from tape.space()
        while True:
            if here := (yield from tape.stands(_OPENINGS)):
                tape.skip(len(here))
            name = (yield from tape.until(_NAME_END, _NAME_LIMIT)).strip()
            if (yield from tape.peek()) != "{" or " " in name:
                raise Unreadable("no call stands here")
            calls.name(name)
            yield from self._arguments(tape, calls)
            yield from tape.space()
            if not (yield from tape.stands((_CALL,))):
                return None

    def naked(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After the word that begins a call, with no token before it: only a tool on offer is surely meant."""
        name = ""
        while (char := (yield from tape.peek())) and _IN_NAME.match(char) and len(name) < _NAME_LIMIT:
            name += tape.skip(1)
        if char != "{" or not name:
            raise Unreadable("no call stands here")
        calls.name(name)
        if not calls.is_known:
            raise Unoffered(name, _CERTAIN)
        yield from self._arguments(tape, calls)
        return None

    def _arguments(self, tape: Tape, calls: Calls) -> Steps[None]:
        yield from _Arguments(tape, calls, tape.mark(self._quote), tape.mark(self._close)).read()
        calls.close()


class _Arguments:
    def __init__(self, tape: Tape, calls: Calls, quote: str, close: str) -> None:
        self._tape, self._put = tape, calls.put
        self._quote, self._close = quote, close
        self._next = re.compile(f"{re.escape(quote)}|{re.escape(close)}")
        self._types = TypedArguments(calls).allowed

    def read(self) -> Steps[None]:
        yield from self._object(1)

    def _object(self, depth: int) -> Steps[None]:
        """At the opening bracket."""
        self._put(self._tape.skip(1))
        comma = ""
        while not (yield from self._ends("}")):
            key = yield from self._key()
            self._put(f'{comma}"{quoted(key)}": ')
            yield from self._value(depth, self._types(key) if depth == 1 else ())
            comma = ", "
        self._put("}")

    def _list(self, depth: int) -> Steps[None]:
        self._put(self._tape.skip(1))
        comma = ""
        while not (yield from self._ends("]")):
            yield from self._expect_item()
            self._put(comma)
            yield from self._value(depth, ())
            comma = ", "
        self._put("]")

    def _expect_item(self) -> Steps[None]:
        """A bare word may be empty between the commas of an object. In a list that would be an item without end."""
        char = yield from self._tape.peek()
        if char not in ("{", "[") and _BARE_END.match(char) and not (yield from self._tape.stands((self._quote,))):
            raise Unreadable("no item stands here")

    def _ends(self, bracket: str) -> Steps[bool]:
        """Move to the next member. True: there is none; at the end of it all brackets may be missing."""
        tape = self._tape
        while True:
            yield from tape.space()
            char = yield from tape.peek()
            if char == ",":
                tape.skip(1)
            elif char == bracket:
                tape.skip(1)
                return True
            elif not char and tape.cut:
                raise Unreadable("cut off inside a call")
            else:
                return not char or (yield from tape.stands((self._close,))) is not None

    def _key(self) -> Steps[str]:
        tape = self._tape
        if (yield from tape.stands((self._quote,))):
            parts: list[str] = []
            yield from self._text(parts.append)
            key = "".join(parts)
        elif (yield from tape.peek()) == '"':
            tape.skip(1)
            key = yield from tape.until(_QUOTED_END, _NAME_LIMIT)
            tape.skip(1)
        else:
            key = yield from self._bare_key()
        yield from tape.space()
        if (yield from tape.peek()) != ":":
            raise Unreadable("no key stands here")
        tape.skip(1)
        yield from tape.space()
        return key

    def _bare_key(self) -> Steps[str]:
        key = (yield from self._tape.until(_KEY_END, _NAME_LIMIT)).strip()
        if not key:
            raise Unreadable("no key stands here")
        return key

    def _value(self, depth: int, allowed: tuple[str, ...]) -> Steps[None]:
        tape = self._tape
        char = yield from tape.peek()
        if char in ("{", "["):
            if depth >= _DEPTH:
                raise Unreadable("too deep")
            yield from (self._object if char == "{" else self._list)(depth + 1)
        elif char and char in "\"'":
            yield from JsonValue(tape, self._put).read()
        elif not (yield from tape.stands((self._quote,))):
            self._put((yield from self._bare(allowed)))
        elif allowed and not _TEXT.intersection(allowed):
            parts: list[str] = []
            yield from self._text(parts.append)
            self._put(convert("".join(parts), allowed))
        else:
            self._put('"')
            yield from self._text(lambda text: self._put(quoted(text)))
            self._put('"')

    def _bare(self, allowed: tuple[str, ...]) -> Steps[str]:
        word = yield from self._word()
        lost = None if _is_literal(word.strip()) else (yield from self._half_quoted())
        if lost is None:
            return _meant(word.strip(), allowed)
        self._tape.skip(len(self._quote))
        return convert(word + lost, allowed or ("string",))

    def _half_quoted(self) -> Steps[str | None]:
        """The rest of a text whose first quote was forgotten, up to its second. None: the next quote begins a text."""
        tape = self._tape
        while (found := self._next.search(tape.text, tape.at, tape.at + _TEXT_LIMIT)) is None:
            if tape.ended or len(tape.text) - tape.at >= _TEXT_LIMIT:
                return None
            yield
        if found.group() == self._close or tape.text[tape.at : found.start()].rstrip().endswith(_BEFORE_TEXT):
            return None
        return tape.take(found.start())

    def _word(self) -> Steps[str]:
        parts: list[str] = []
        tape = self._tape
        while True:
            found = _BARE_END.search(tape.text, tape.at)
            parts.append(tape.take(found.start() if found else len(tape.text)))
            if not found and tape.ended and tape.cut:
                raise Unreadable("cut off inside a value")
            if found or tape.ended:
                return "".join(parts)
            yield

    def _text(self, say: Callable[[str], None]) -> Steps[None]:
        """From quote to quote, as it comes."""
        tape = self._tape
        tape.skip(len(self._quote))
        ends = (self._quote, self._close) if self._close in tape.special else (self._quote,)
        end = yield from verbatim(tape, ends, say)
        if end == self._quote:
            tape.skip(len(end))
        elif end or tape.cut:
            raise Unreadable("a text without an end")


def _is_literal(word: str) -> bool:
    """Quotes would stand around anything else."""
    try:
        return word in _NOTHING or bool(mended(word))
    except Unreadable:
        return False


def _meant(word: str, allowed: tuple[str, ...]) -> str:
    """A number, a truth value, or a string that lost its quotes."""
    if allowed:
        return convert(word, allowed)
    if word in _NOTHING:
        return "null"
    return mended(word) if _is_literal(word) else f'"{quoted(word)}"'
