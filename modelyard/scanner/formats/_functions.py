"""Calls as `<function=name>` with one `<parameter=name>` for each value, as several families write them."""

from __future__ import annotations

import re
from functools import cached_property

from modelyard.core.format import Read
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value, parameter_name
from modelyard.scanner.typed import TypedArguments

FUNCTION, END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NAME_END = re.compile(rf"[>\n<{SURROGATES}]")
_NAME_LIMIT = 128


class Functions:
    """`outer` and `close` stand around a call; `lines` says that a value stands on lines of its own."""

    def __init__(self, outer: str, close: str, *, lines: bool = True) -> None:
        self._outer, self._close = outer, close
        self._tags = Tags(PARAMETER, ">", PARAMETER_END, (END, close), (outer, FUNCTION), lines)

    @cached_property
    def marks(self) -> dict[str, Read]:
        return {self._outer: Read(self._wrapped, (self._close,)), FUNCTION: Read(self._naked, (END, self._close))}

    def _wrapped(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After the outer tag: functions one after another, or JSON."""
        yield from tape.space()
        if (yield from tape.peek()) in ("{", "["):
            return (yield from json_calls(tape, calls))
        function = (tape.mark(FUNCTION),)
        if not (yield from tape.stands(function)):
            raise Unreadable("no function stands here")
        while (yield from tape.stands(function)):
            tape.skip(len(function[0]))
            yield from self._naked(tape, calls)
            yield from tape.space()
        return None

    def _naked(self, tape: Tape, calls: Calls) -> Steps[str | None]:
        """After `<function=`."""
        calls.name((yield from _name(tape)))
        arguments = TypedArguments(calls)
        yield from tape.space()
        if (yield from tape.peek()) == "{":
            yield from json_arguments(tape, calls)
        else:
            yield from self._parameters(tape, arguments)
        yield from tape.space()
        if here := (yield from tape.stands((tape.mark(END),))):
            tape.skip(len(here))
        return None

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
        arguments.begin((yield from _name(tape)))
        if not (yield from Value(tape, self._tags, arguments).read()) and tape.cut:
            raise Unreadable("cut off inside a parameter")
        arguments.end()


def _name(tape: Tape) -> Steps[str]:
    name = parameter_name((yield from tape.until(_NAME_END, _NAME_LIMIT)))
    if (yield from tape.peek()) != ">":
        raise Unreadable("a tag without an end")
    tape.skip(1)
    return name
