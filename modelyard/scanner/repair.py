"""JSON as models write it, read from the tape and passed on as a valid prefix at every moment.

Valid JSON passes unchanged, down to its white space. Where one reading is certain, it is mended on the way: single
quotes, trailing, doubled and missing commas, bare keys, Python's literals, raw control characters and wrong escapes in
strings, brackets that were never closed. Everything else is unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable

_DEPTH = 256  # deeper than any arguments; what reads them next would refuse it anyway
_PLAIN = {q: re.compile(rf'[^"\\\x00-\x1f{SURROGATES}{q}]*') for q in "\"'"}
_LITERAL = re.compile(rf"[^\s,:\[\]{{}}\"'<{SURROGATES}]*")
_GAP = re.compile(r"[\s,]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_LOOSE_NUMBER = re.compile(r"\+?(-?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?\Z")
_BARE_KEY = re.compile(r"[A-Za-z_$][\w$-]*\Z")
_WORDS = {w: w for w in ("true", "false", "null")} | {"True": "true", "False": "false", "None": "null"}
_CONTROLS = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_OPENERS = frozenset("{[")
SET = "set"  # Python's, for which JSON has lists
_CLOSER = {"{": "}", "[": "]", SET: "}"}
_WRITTEN = _CLOSER | {SET: "]"}
_HEX = re.compile(r"\\u[0-9a-fA-F]{4}\Z")
_LONE = "\\ufffd"

Put = Callable[[str], None]


class JsonValue:
    """Reads one value. `read` returns when it is complete and raises Unreadable when it cannot be."""

    def __init__(self, tape: Tape, put: Put) -> None:
        self._tape, self._put = tape, put
        self._stack: list[str] = []
        self._first = True

    def read(self) -> Steps[None]:
        try:
            yield from self._value()
            while self._stack:
                yield from self._member()
        except Unreadable as error:
            error.depth += len(self._stack)
            raise

    def _member(self) -> Steps[None]:
        if (yield from self._next()):
            if self._stack[-1] == "{":
                yield from self.key()
                yield from self.colon()
            yield from self._value()

    def _value(self) -> Steps[None]:
        self._put((yield from self._tape.space()))
        char = yield from self._tape.peek()
        if char in _OPENERS and len(self._stack) < _DEPTH:
            self._tape.skip(1)
            yield from self._open(char)
            return
        if char in _PLAIN:
            yield from self._string(char)
        else:
            self._put(mended((yield from self._literal())))
        self._first = False

    def _open(self, bracket: str) -> Steps[None]:
        """After the bracket that begins a container."""
        yield from ()
        self._put(bracket)
        self._stack.append(bracket)
        self._first = True

    def _next(self) -> Steps[bool]:
        """Move to the next member of the open container. False: there is none, the container is closed."""
        gap = yield from self._gap()
        char = yield from self._tape.peek()
        commas = gap.count(",")
        if char in "]}" or char == "<" or char in self._tape.special:
            self._close(char, gap.replace(",", ""))
            return False
        if self._first and commas:
            raise Unreadable("a comma before the first member")
        if not self._first and not commas:
            gap = "," + gap
        self._put(gap.replace(",", "", commas - 1) if commas > 1 else gap)
        return True

    def _close(self, char: str, gap: str) -> None:
        opener = self._stack.pop()
        if char == _CLOSER[opener]:
            self._tape.skip(1)
            self._put(gap + _WRITTEN[opener])
        elif not char and self._tape.cut:
            raise Unreadable("cut off inside a container")
        elif char and char in "]}" and not any(_CLOSER[o] == char for o in self._stack):
            raise Unreadable(f"{char} closes nothing")
        else:  # its own bracket is missing: what stands here closes something outside
            self._put(gap + _WRITTEN[opener])
        self._first = False

    def _gap(self) -> Steps[str]:
        taken: list[str] = []
        while True:
            found = _GAP.match(self._tape.text, self._tape.at)
            if found and found.end() > self._tape.at:
                taken.append(self._tape.take(found.end()))
            if not self._tape.is_empty or self._tape.ended:
                return "".join(taken)
            yield

    def key(self) -> Steps[None]:
        char = yield from self._tape.peek()
        if char in _PLAIN:
            yield from self._string(char)
        else:
            bare = yield from self._literal()
            self._put(key_of(bare))

    def colon(self) -> Steps[None]:
        space = yield from self._tape.space()
        if (yield from self._tape.peek()) != ":":
            raise Unreadable("a key without a colon")
        self._put(space + self._tape.skip(1))

    def _literal(self) -> Steps[str]:
        taken: list[str] = []
        while True:
            found = _LITERAL.match(self._tape.text, self._tape.at)
            if found and found.end() > self._tape.at:
                taken.append(self._tape.take(found.end()))
            if not self._tape.is_empty or self._tape.ended:
                return "".join(taken)
            yield

    def _string(self, quote: str) -> Steps[None]:
        tape, put, plain = self._tape, self._put, _PLAIN[quote]
        tape.skip(1)
        put('"')
        while True:
            found = plain.match(tape.text, tape.at)
            if found and found.end() > tape.at:
                put(tape.take(found.end()))
            char = yield from tape.peek()
            if char == quote and (yield from self._closes()):
                tape.skip(1)
                put('"')
                return
            if char == "\\":
                yield from self._escape()
            elif not char or char in tape.special:
                raise Unreadable("a string without an end")
            elif char in _PLAIN or char < " " or "\ud800" <= char <= "\udfff":
                tape.skip(1)
                put(_inside(char))

    def _closes(self) -> Steps[bool]:
        """The string's own quote stands here: in JSON that is its end."""
        yield from ()
        return True

    def _escape(self) -> Steps[None]:
        tape = self._tape
        two = yield from tape.ahead(2)
        if len(two) < 2:
            raise Unreadable("a string without an end")
        if two[1] == "u":
            yield from self._unicode()
        elif two[1] in '"\\/bfnrt':
            self._put(tape.skip(2))
        elif two[1] == "'":
            tape.skip(2)
            self._put("'")
        else:  # a lone backslash, as in a path or a pattern
            tape.skip(1)
            self._put("\\\\")

    def _unicode(self) -> Steps[None]:
        tape = self._tape
        one = yield from tape.ahead(6)
        if not _HEX.match(one):
            tape.skip(1)
            self._put("\\\\")
        elif not "d800" <= one[2:].lower() <= "dfff":
            self._put(tape.skip(6))
        elif _is_pair((yield from tape.ahead(12))):
            self._put(tape.skip(12))
        else:  # half a character: no reader downstream takes it
            tape.skip(6)
            self._put(_LONE)


def _is_pair(both: str) -> bool:
    low = both[6:]
    return both[2:].lower() < "dc00" and bool(_HEX.match(low)) and "dc00" <= low[2:].lower() <= "dfff"


def _inside(char: str) -> str:
    """A character that JSON wants escaped in a string."""
    if char in _PLAIN:
        return '\\"' if char == '"' else char
    if char >= "\ud800":
        return _LONE
    return _CONTROLS.get(char) or f"\\u{ord(char):04x}"


def key_of(bare: str) -> str:
    """A key without quotes as JSON writes it."""
    return f'"{bare if _BARE_KEY.match(bare) else mended(bare)}"'


def mended(literal: str) -> str:
    """A number or word as JSON writes it."""
    if literal in _WORDS:
        return _WORDS[literal]
    if _NUMBER.match(literal):
        return literal
    found = _LOOSE_NUMBER.match(literal)
    if found and (found[2] or found[3]):
        return f"{found[1]}{found[2] or 0}" + (f".{found[3] or 0}" if found[3] is not None else "")
    raise Unreadable(f"{literal[:20]!r} is no value")


def mend(text: str) -> str | None:
    """The JSON that this text certainly means, or None."""
    tape = Tape({})
    out: list[str] = []
    tape.push(text)
    tape.ended = True
    try:
        for _ in JsonValue(tape, out.append).read():
            pass
    except Unreadable:
        return None
    return "".join(out) if not tape.text[tape.at :].strip() else None
