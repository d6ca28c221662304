"""Hunyuan 3's calls: a bare name, a separator, then keys and values in tags of their own, all of them tokens.

    <tool_calls>
    <tool_call>get_weather<tool_sep>
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    </tool_calls>

Released vocabularies put a suffix into every tag: `<tool_calls:opensource>`, `</think:opensource>`. Line breaks between
the tags come and go; the outer tags, the separator and closing tags are at times forgotten.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import NAME_LIMIT, function_name
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value
from modelyard.scanner.typed import TypedArguments

_TAG = re.compile(rf"[<{SURROGATES}]")


class Suffixed:
    """The tags of one vocabulary."""

    def __init__(self, suffix: str) -> None:
        def pair(name: str) -> tuple[str, str]:
            return f"<{name}{suffix}>", f"</{name}{suffix}>"

        self.think, self._calls, self._call = pair("think"), pair("tool_calls"), pair("tool_call")
        self._key, self._value = pair("arg_key"), pair("arg_value")
        self._sep = f"<tool_sep{suffix}>"
        self._ends = (self._call[1], self._calls[1])
        self._tags = Tags(self._key[0], self._key[1], self._value[1], self._ends, (self._call[0],), lines=False)
        self.marks = {
            self._calls[0]: StartReader(self._block, self._ends),
            self._call[0]: StartReader(self._one, self._ends),
        }
        self.hidden = (*self._ends, self._sep)
        self.inner = (*self._key, *self._value)

    def _block(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After the outer opening: calls one after another."""
        call = tape.mark(self._call[0])
        yield from tape.space()
        if not (yield from tape.stands((call,))):
            raise Unreadable("no call stands here")
        while (yield from tape.stands((call,))):
            tape.skip(len(call))
            yield from self._one(tape, calls)
            yield from tape.space()
        yield from _skip(tape, self._calls[1])
        return None

    def _one(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After a call's own opening."""
        calls.name(function_name((yield from tape.until(_TAG, NAME_LIMIT))))
        yield from _skip(tape, self._sep)
        yield from self._arguments(tape, TypedArguments(calls))
        yield from _skip(tape, self._call[1])
        return None

    def _arguments(self, tape: Tape, arguments: TypedArguments) -> Steps[None]:
        key, others = tape.mark(self._key[0]), tuple(map(tape.mark, (*self._ends, self._call[0])))
        while True:
            yield from tape.space()
            here = yield from tape.stands((key, *others))
            if here == key:
                tape.skip(len(here))
                yield from self._argument(tape, arguments)
            elif here or ((yield from tape.peek()) == "" and not tape.cut):
                return arguments.close()
            else:
                raise Unreadable("neither an argument nor the end of the call")

    def _argument(self, tape: Tape, arguments: TypedArguments) -> Steps[None]:
        name = (yield from tape.until(_TAG, NAME_LIMIT)).strip()
        if not (yield from _skip(tape, self._key[1])):
            raise Unreadable("a key without an end")
        yield from tape.space()
        if not (yield from _skip(tape, self._value[0])):
            raise Unreadable("a key without a value")
        arguments.begin(name)
        if not (yield from Value(tape, self._tags, arguments).read()) and tape.cut:
            raise Unreadable("cut off inside a value")
        arguments.end()


def _skip(tape: Tape, tag: str) -> Steps[bool]:
    here = yield from tape.stands((tape.mark(tag),))
    tape.skip(len(here or ""))
    return here is not None


FAMILIES = (Suffixed(""), Suffixed(":opensource"))
