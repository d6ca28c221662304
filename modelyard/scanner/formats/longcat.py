"""Calls between the family's own tags, as JSON or as keys and values: LongCat Flash.

    <longcat_think>I need the weather.</longcat_think>
    <longcat_tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </longcat_tool_call>

Later models write, with text as it is and all other values as JSON,

    <longcat_tool_call>get_weather
    <longcat_arg_key>city</longcat_arg_key>
    <longcat_arg_value>Paris</longcat_arg_value>
    </longcat_tool_call>
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import NAME_LIMIT, function_name
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value
from modelyard.scanner.typed import ANY, TypedArguments

_CALL, _END = "<longcat_tool_call>", "</longcat_tool_call>"
_KEY, _KEY_END = "<longcat_arg_key>", "</longcat_arg_key>"
_VALUE, _VALUE_END = "<longcat_arg_value>", "</longcat_arg_value>"
_TAGS = Tags(_KEY, _KEY_END, _VALUE_END, (_END,), (_CALL,), lines=False)
_NAME_END = re.compile(rf"[<\n{SURROGATES}]")


def _call(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    if (yield from tape.peek()) in ("{", "["):
        return (yield from json_calls(tape, calls))
    calls.name(function_name((yield from tape.until(_NAME_END, NAME_LIMIT))))
    yield from _pairs(tape, TypedArguments(calls))
    return None


def _pairs(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    key, closers = tape.mark(_KEY), tuple(map(tape.mark, (_END, _CALL)))
    while True:
        yield from tape.space()
        here = yield from tape.stands((key, *closers))
        if here == key:
            tape.skip(len(here))
            yield from _pair(tape, arguments)
        elif here or ((yield from tape.peek()) == "" and not tape.cut):
            return arguments.close()
        else:
            raise Unreadable("neither a key nor the end of the call")


def _pair(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    name = (yield from tape.until(_NAME_END, NAME_LIMIT)).strip()
    yield from _expect(tape, _KEY_END)
    yield from tape.space()
    yield from _expect(tape, _VALUE)
    arguments.begin(name, arguments.allowed(name) or ANY)
    if not (yield from Value(tape, _TAGS, arguments).read()) and tape.cut:
        raise Unreadable("cut off inside a value")
    arguments.end()


def _expect(tape: Tape, tag: str) -> Steps[None]:
    if not (here := (yield from tape.stands((tape.mark(tag),)))):
        raise Unreadable(f"{tag} is missing")
    tape.skip(len(here))


FORMAT = OutputFormat(
    name="longcat",
    regions=regions((("<longcat_think>", "</longcat_think>"), *THINK), {_CALL: StartReader(_call, (_END,))}),
    hidden=(_END, "</longcat_s>"),
    inner=(_KEY, _KEY_END, _VALUE, _VALUE_END),
    stops=("</longcat_s>",),
    turn=("ASSISTANT:", "<longcat_assistant>"),
    template=((_CALL,),),
    names=("longcat",),
)
