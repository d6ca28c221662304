"""Values between tags, as text: where such a value really ends, though it may hold the same tags itself.

Code that is written into a file may contain the closing tag. It ends the value only where the next parameter or the
end of the call follows; a tag that is a token of the vocabulary is always itself. The next parameter is any that was
not given yet: models invent some, and the tool should get to refuse them. But one that the schema does not know follows
only a closing tag of the value's own, not one that closes a tag which the value itself quotes. So an example of a call
goes into a file whole; a file that holds `</parameter>` and then `<parameter=x>` without an opening one before is cut.

White space inside is exact: only where a family writes values on lines of their own does the line break on either side
belong to the tags.
"""

from __future__ import annotations

import re

from msgspec import Struct

from modelyard.scanner.lexer import SURROGATES, Steps, Tape
from modelyard.scanner.typed import TypedArguments

_TAG = re.compile(f"[<{SURROGATES}]")
_IS_NAME = re.compile(r"[\w.-]+\Z")
_NAME_LIMIT = 128
_SPACE_LIMIT = 512


class Tags(Struct, frozen=True):
    """`opening` begins a parameter's name, `named` ends it; `ends` close the whole call, `after` follow a call."""

    opening: str
    named: str
    closing: str
    ends: tuple[str, ...]
    after: tuple[str, ...]
    lines: bool = True  # a value stands on lines of its own


class Value:
    """Reads one value into `arguments`, streaming what is certain to belong to it."""

    def __init__(self, tape: Tape, tags: Tags, arguments: TypedArguments) -> None:
        self._tape, self._arguments, self._lines = tape, arguments, tags.lines
        self._opening, self._named, self._closing = map(tape.mark, (tags.opening, tags.named, tags.closing))
        self._ends = tuple(map(tape.mark, tags.ends))
        self._after = tuple(map(tape.mark, tags.after))
        self._tokens = tuple(filter(self._is_token, self._after))
        self._line = ""  # a line break that belongs to the closing tag, if one follows
        self._on_new_line = False
        self._quoted = 0  # parameters that the value itself opens and has not closed yet

    def read(self) -> Steps[bool]:
        """True: closed by its tag or by what follows. False: the output ended inside it."""
        tape = self._tape
        if self._lines and (yield from tape.peek()) == "\n":
            tape.skip(1)
        while True:
            found = _TAG.search(tape.text, tape.at)
            self._say(tape.take(found.start() if found else len(tape.text)))
            if (yield from tape.peek()) == "":
                return False
            if found and (yield from self._closes()):
                return True
            if found:
                char = tape.skip(1)
                self._say("" if char in tape.special else char)

    def _say(self, text: str) -> None:
        if not text:
            return
        self._on_new_line = text.endswith("\n")
        if self._lines:
            text = self._line + text
            self._line = "\n" if self._on_new_line else ""
            text = text.removesuffix("\n")
        if text:
            self._arguments.text(text)

    def _is_token(self, tag: str) -> bool:
        """Certain: no text spells it."""
        return not self._tape.special.isdisjoint(tag)

    def _closes(self) -> Steps[bool]:
        """A tag stands here. Does it end the value?"""
        tape = self._tape
        here = yield from tape.stands((self._closing, self._opening, *self._ends, *self._tokens))
        if here is None:
            return False
        if here == self._closing:
            if self._is_token(here) or (yield from self._is_end(len(here))):
                tape.skip(len(here))
                return True
            self._quoted = max(0, self._quoted - 1)
            return False
        if self._is_token(here):
            return True
        if here == self._opening:
            return (yield from self._was_forgotten())
        return (yield from self._is_over(len(here)))

    def _was_forgotten(self) -> Steps[bool]:
        """An opening tag stands here. If the schema knows the name, a closing tag was forgotten; else it is text,
        unless nobody knows the names and the tag begins a line."""
        name = yield from self._name(0)
        known = name in self._arguments.properties or self._on_new_line
        if name is not None and known and self._arguments.may_begin(name):
            return True
        self._quoted += name is not None
        return False

    def _is_end(self, offset: int) -> Steps[bool]:
        offset = yield from self._past_space(offset)
        if self._tape.ended and self._tape.at + offset >= len(self._tape.text):
            return True
        here = yield from self._tape.stands((self._opening, *self._ends, *self._after), offset)
        if here != self._opening:
            return here is not None
        name = yield from self._name(offset)
        return name is not None and self._arguments.may_begin(name, invented=not self._quoted)

    def _is_over(self, offset: int) -> Steps[bool]:
        """The call's end without the value's: believed only where nothing but another call can follow."""
        offset = yield from self._past_space(offset)
        if self._tape.ended and self._tape.at + offset >= len(self._tape.text):
            return True
        return (yield from self._tape.stands((*self._after, *self._ends), offset)) is not None

    def _past_space(self, offset: int) -> Steps[int]:
        tape = self._tape
        while offset < _SPACE_LIMIT:
            if tape.at + offset < len(tape.text):
                if not tape.text[tape.at + offset].isspace():
                    break
                offset += 1
            elif tape.ended:
                break
            else:
                yield
        return offset

    def _name(self, offset: int) -> Steps[str | None]:
        """The name in the parameter's tag that stands there; None: it has none."""
        tape, start = self._tape, offset + len(self._opening)
        while True:
            end = tape.text.find(self._named, tape.at + start, tape.at + start + _NAME_LIMIT)
            if end >= 0:
                name = parameter_name(tape.text[tape.at + start : end])
                return name if _IS_NAME.match(name) or self._arguments.may_begin(name) else None
            if tape.ended or len(tape.text) - tape.at - start >= _NAME_LIMIT:
                return None
            yield


def parameter_name(raw: str) -> str:
    """Without quotes, and without the attributes that may follow them."""
    name = raw.strip()
    return name[1:].partition(name[0])[0] if name[:1] in ("'", '"') else name.strip("\"'")
