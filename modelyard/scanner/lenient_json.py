"""JSON as models write it, read incrementally and passed on as a valid prefix at every moment.

Valid JSON passes unchanged, including its white space. Errors with only one possible meaning are repaired: single
quotes, trailing, doubled and missing commas, bare keys, Python's literals, raw control characters and wrong escapes in
strings, missing closing brackets. Everything else is a ParseError.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from modelyard.scanner.lexer import FOREIGN, SURROGATES, Incremental, ParseError, TextBuffer

_MAX_DEPTH = 256  # deeper than any arguments; the next parser would refuse more
_PLAIN = {q: re.compile(rf'[^"\\\x00-\x1f{SURROGATES}{q}]*') for q in "\"'"}
_LITERAL = re.compile(rf"[^\s,:\[\]{{}}\"'<{SURROGATES}]*")
_COMMAS = re.compile(rf"[\s,{FOREIGN}]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_LOOSE_NUMBER = re.compile(r"\+?(-?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?\Z")
_BARE_KEY = re.compile(r"[A-Za-z_$][\w$-]*\Z")
_WORDS = {w: w for w in ("true", "false", "null")} | {"True": "true", "False": "false", "None": "null"}
_CONTROLS = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
SET = "set"  # a Python set, written as a JSON list
_CLOSER = {"{": "}", "[": "]", SET: "}"}
_JSON_CLOSER = _CLOSER | {SET: "]"}
_HEX = re.compile(r"\\u[0-9a-fA-F]{4}\Z")
_CUT_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?")
_REPLACEMENT = "\\ufffd"


def escape_json(text: str) -> str:
    """The text as a JSON string without its quotes. Half characters become the replacement character."""
    try:
        return msgspec.json.encode(text)[1:-1].decode()
    except UnicodeEncodeError:
        return escape_json(text.encode("utf-8", "replace").decode())


class JsonReader:
    """Reads one value and emits it as valid JSON. `is_whole`: the input is the whole value, and its end closes all
    brackets. Otherwise a value that the output leaves open is a ParseError."""

    def __init__(self, buffer: TextBuffer, emit: Callable[[str], None], *, is_whole: bool = False) -> None:
        self._buffer, self._emit, self._is_whole = buffer, emit, is_whole
        self._stack: list[str] = []
        self._is_first = True  # the next member is the first of its container
        self._quoted = 0  # calls that a string opens and has not closed yet

    def read(self) -> Incremental[None]:
        try:
            yield from self._value()
            while self._stack:
                if (yield from self._next_member()):
                    if self._stack[-1] == "{":
                        yield from self.key()
                        yield from self.colon()
                    yield from self._value()
        except ParseError as error:
            error.depth += len(self._stack)
            raise

    def _value(self) -> Incremental[None]:
        self._emit(self._buffer.without_foreign((yield from self._buffer.skip_space())))
        char = yield from self._buffer.peek()
        if char in ("{", "[") and len(self._stack) < _MAX_DEPTH:
            self._buffer.skip(1)
            yield from self._open(char)
            return
        if char in _PLAIN:
            yield from self._string(char)
        else:
            self._emit(repair_literal((yield from self._literal())))
        self._is_first = False

    def _open(self, bracket: str) -> Incremental[None]:
        """After the bracket that opens a container."""
        yield from ()
        self._emit(bracket)
        self._stack.append(bracket)
        self._is_first = True

    def _next_member(self) -> Incremental[bool]:
        """Move to the next member of the open container. False: there is none, and the container is closed."""
        gap = self._buffer.without_foreign((yield from self._buffer.read_run(_COMMAS)))
        char = yield from self._buffer.peek()
        commas = gap.count(",")
        if char in "]}" or char == "<" or char in self._buffer.token_codes:
            self._close(char, gap.replace(",", ""))
            return False
        if self._is_first and commas:
            raise ParseError("a comma before the first member")
        if not self._is_first and not commas:
            gap = "," + gap
        self._emit(gap.replace(",", "", commas - 1) if commas > 1 else gap)
        return True

    def _close(self, char: str, gap: str) -> None:
        opener = self._stack.pop()
        if char == _CLOSER[opener]:
            self._buffer.skip(1)
        elif not char and not self._is_whole:
            raise ParseError("the output ends inside a container")
        elif char and char in "]}" and not any(_CLOSER[o] == char for o in self._stack):
            raise ParseError(f"{char} closes nothing")
        # Otherwise the closing bracket is missing: this one closes an outer container.
        self._emit(gap + _JSON_CLOSER[opener])
        self._is_first = False

    def key(self) -> Incremental[None]:
        char = yield from self._buffer.peek()
        if char in _PLAIN:
            yield from self._string(char)
        else:
            self._emit(quote_key((yield from self._literal())))

    def colon(self) -> Incremental[None]:
        space = self._buffer.without_foreign((yield from self._buffer.skip_space()))
        if (yield from self._buffer.peek()) != ":":
            raise ParseError("a key without a colon")
        self._emit(space + self._buffer.skip(1))

    def _literal(self) -> Incremental[str]:
        return (yield from self._buffer.read_run(_LITERAL))

    def _string(self, quote: str) -> Incremental[None]:
        buffer, emit, plain = self._buffer, self._emit, _PLAIN[quote]
        buffer.skip(1)
        emit('"')
        while True:
            if text := buffer.take_match(plain):
                emit(text)
            char = yield from buffer.peek()
            if char == quote and (yield from self._is_closing_quote()):
                buffer.skip(1)
                emit('"')
                return
            if char == "\\":
                yield from self._escape()
            elif not char:
                raise ParseError("a string without an end")
            elif char in _PLAIN or char < " ":
                buffer.skip(1)
                emit(_escaped(char))
            elif "\ud800" <= char <= "\udfff":
                emit(escape_json((yield from self._quoted_token())))

    def _quoted_token(self) -> Incremental[str]:
        """The text of the token that comes next, unless it ends the call: then the string has no end."""
        buffer = self._buffer
        tag = yield from buffer.peek()
        if tag in buffer.openings:
            self._quoted += 1
        elif self._quoted:
            self._quoted -= tag in buffer.closing
        elif (yield from buffer.is_call_end()):
            raise ParseError("a string without an end")
        return buffer.spelled(buffer.skip(1))

    def _is_closing_quote(self) -> Incremental[bool]:
        """The quote of the string comes next. In JSON it always ends the string."""
        yield from ()
        return True

    def _escape(self) -> Incremental[None]:
        two = yield from self._buffer.lookahead(2)
        if len(two) < 2:
            self._buffer.skip(1)
            raise ParseError("a string without an end")
        if two[1] == "u":
            yield from self._unicode()
        elif two[1] in '"\\/bfnrt':
            self._emit(self._buffer.skip(2))
        elif two[1] == "'":
            self._buffer.skip(2)
            self._emit("'")
        else:
            self._lone_backslash()

    def _lone_backslash(self) -> None:
        """A backslash that escapes nothing, as in a path or a pattern."""
        self._buffer.skip(1)
        self._emit("\\\\")

    def _unicode(self) -> Incremental[None]:
        buffer = self._buffer
        escape = yield from buffer.lookahead(6)
        if len(escape) < 6:
            self._check_escape(escape)
        if not _HEX.match(escape):
            self._lone_backslash()
        elif not "d800" <= escape[2:].lower() <= "dfff":
            self._emit(buffer.skip(6))
        elif _is_surrogate_pair((yield from buffer.lookahead(12))):
            self._emit(buffer.skip(12))
        else:  # half a character, which no JSON parser accepts
            self._check_escape((yield from buffer.lookahead(12)))
            buffer.skip(6)
            self._emit(_REPLACEMENT)

    def _check_escape(self, escape: str) -> None:
        """Raises if a limit cut it off: its beginning is no text."""
        if self._buffer.truncated and _CUT_ESCAPE.fullmatch(escape):
            self._buffer.skip(len(escape))
            raise ParseError("cut off inside an escape")


def _is_surrogate_pair(escapes: str) -> bool:
    low = escapes[6:]
    return escapes[2:].lower() < "dc00" and bool(_HEX.match(low)) and "dc00" <= low[2:].lower() <= "dfff"


def _escaped(char: str) -> str:
    """A character that must be escaped in a JSON string."""
    if char in _PLAIN:
        return '\\"' if char == '"' else char
    return _CONTROLS.get(char) or f"\\u{ord(char):04x}"


def quote_key(bare: str) -> str:
    """A key without quotes as JSON."""
    return f'"{bare if _BARE_KEY.match(bare) else repair_literal(bare)}"'


def repair_literal(literal: str) -> str:
    """A number or word as JSON."""
    if literal in _WORDS:
        return _WORDS[literal]
    if _NUMBER.match(literal):
        return literal
    found = _LOOSE_NUMBER.match(literal)
    if found and (found[2] or found[3]):
        return f"{found[1]}{found[2] or 0}" + (f".{found[3] or 0}" if found[3] is not None else "")
    raise ParseError(f"{literal[:20]!r} is not a value")


def repair_json(text: str) -> str | None:
    """The JSON that this text certainly means, or None."""
    buffer = TextBuffer({})
    out: list[str] = []
    buffer.push(text)
    buffer.end()
    try:
        for _ in JsonReader(buffer, out.append, is_whole=True).read():
            pass
    except ParseError:
        return None
    return "".join(out) if not buffer.text[buffer.pos :].strip() else None
