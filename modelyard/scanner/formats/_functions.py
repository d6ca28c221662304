"""Calls as `<function=name>` with one `<parameter=name>` for each value, as several families write them.

Tags that models get wrong are read where one reading is certain: `<function name>` of a tool that was offered, a name
that a line break ends instead of the bracket, and `<parameter=parameter=name>`.
"""

from __future__ import annotations

import re
from functools import cached_property

from modelyard.core.output_format import StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value, parameter_name
from modelyard.scanner.typed import TypedArguments

FUNCTION, END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NO_SIGN = FUNCTION[:-1]
_NAME_END = re.compile(rf"[>\n<{SURROGATES}]")
_NAME_LIMIT = 128


class Functions:
    """`outer` and `close` stand around a call; `lines` says that a value stands on lines of its own."""

    def __init__(self, outer: str, close: str, *, lines: bool = True) -> None:
        self._outer, self._close = outer, close
        self._tags = Tags(PARAMETER, ">", PARAMETER_END, (END, close), (outer, FUNCTION), lines)

    @cached_property
    def marks(self) -> dict[str, StartReader]:
        return {
            self._outer: StartReader(self._wrapped, (self._close,)),
            FUNCTION: StartReader(self._naked, (END, self._close)),
        }

    def _wrapped(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After the outer tag: functions one after another, or JSON."""
        yield from tape.space()
        if (yield from tape.peek()) in ("{", "["):
            return (yield from json_calls(tape, calls))
        if not (yield from self._functions(tape, calls)):
            raise Unreadable("no function stands here")
        return None

    def _functions(self, tape: Tape, calls: Calls) -> Steps[int]:
        """How many there are."""
        proper, count = tape.mark(FUNCTION), 0
        while here := (yield from tape.stands((proper,))) or (yield from tape.stands((_NO_SIGN,))):
            tape.skip(len(here))
            calls.name((yield from _name(tape)))
            if here != proper and not calls.is_known:
                raise Unreadable("no function stands here")
            yield from self._body(tape, calls)
            yield from tape.space()
            count += 1
        return count

    def _naked(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After `<function=`."""
        calls.name((yield from _name(tape)))
        yield from self._body(tape, calls)
        return None

    def _body(self, tape: Tape, calls: Calls) -> Steps[None]:
        arguments = TypedArguments(calls)
        yield from tape.space()
        if (yield from tape.peek()) == "{":
            yield from json_arguments(tape, calls)
        else:
            yield from self._parameters(tape, arguments)
        yield from tape.space()
        if here := (yield from tape.stands((tape.mark(END),))):
            tape.skip(len(here))

    def _parameters(self, tape: Tape, arguments: TypedArguments) -> Steps[None]:
        closers = (*map(tape.mark, self._tags.ends), *map(tape.mark, self._tags.after))
        while True:
            yield from tape.space()
            here = yield from tape.stands((PARAMETER, *closers))
            if here == PARAMETER:
                tape.skip(len(here))
                yield from self._parameter(tape, arguments)
            elif here or ((yield from tape.peek()) == "" and not tape.cut):
                return arguments.close()
            else:
                raise Unreadable("neither a parameter nor the end of the call")

    def _parameter(self, tape: Tape, arguments: TypedArguments) -> Steps[None]:
        arguments.begin((yield from _name(tape)).removeprefix(PARAMETER[1:]))
        if not (yield from Value(tape, self._tags, arguments).read()) and tape.cut:
            raise Unreadable("cut off inside a parameter")
        arguments.end()


def _name(tape: Tape) -> Steps[str]:
    name = parameter_name((yield from tape.until(_NAME_END, _NAME_LIMIT)))
    end = yield from tape.peek()
    if end == ">":
        tape.skip(1)
    elif end != "\n" or not name or " " in name:
        raise Unreadable("a tag without an end")
    return name
