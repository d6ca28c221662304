"""Calls as tags, one parameter a tag, every value as text: Qwen 3 Coder, Qwen 3.5 and 3.6.

    I will look.
    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

The models often leave out the outer tag, or the closing ones. Older habits live on: JSON between the outer tags, or
JSON in place of the parameters.
"""

from __future__ import annotations

import re

from modelyard.core.format import Format, Read
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value, parameter_name
from modelyard.scanner.typed import TypedArguments

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_TAGS = Tags(_PARAMETER, ">", "</parameter>", ("</function>", "</tool_call>"), ("<tool_call>", _FUNCTION))
_NAME_END = re.compile(rf"[>\n<{SURROGATES}]")
_NAME_LIMIT = 128


def _wrapped(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `<tool_call>`: functions one after another, or JSON."""
    yield from tape.space()
    if (yield from tape.peek()) in ("{", "["):
        return (yield from json_calls(tape, calls))
    function = (tape.mark(_FUNCTION),)
    if not (yield from tape.stands(function)):
        raise Unreadable("no function stands here")
    while (yield from tape.stands(function)):
        tape.skip(len(function[0]))
        yield from _naked(tape, calls)
        yield from tape.space()
    return None


def _naked(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `<function=`."""
    calls.name((yield from _name(tape)))
    arguments = TypedArguments(calls)
    yield from tape.space()
    if (yield from tape.peek()) == "{":
        yield from json_arguments(tape, calls)
    else:
        yield from _parameters(tape, arguments)
    yield from tape.space()
    if here := (yield from tape.stands((tape.mark("</function>"),))):
        tape.skip(len(here))
    return None


def _name(tape: Tape) -> Steps[str]:
    name = parameter_name((yield from tape.until(_NAME_END, _NAME_LIMIT)))
    if (yield from tape.peek()) != ">":
        raise Unreadable("a tag without an end")
    tape.skip(1)
    return name


def _parameters(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    closers = (*map(tape.mark, _TAGS.ends), *map(tape.mark, _TAGS.after))
    while True:
        yield from tape.space()
        here = yield from tape.stands((_PARAMETER, *closers))
        if here == _PARAMETER:
            tape.skip(len(here))
            yield from _parameter(tape, arguments)
        elif here or ((yield from tape.peek()) == "" and not tape.cut):
            return arguments.close()
        else:
            raise Unreadable("neither a parameter nor the end of the call")


def _parameter(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    arguments.begin((yield from _name(tape)))
    if not (yield from Value(tape, _TAGS, arguments).read()) and tape.cut:
        raise Unreadable("cut off inside a parameter")
    arguments.end()


FORMAT = Format(
    name="qwen3_coder",
    regions=regions(
        THINK,
        {"<tool_call>": Read(_wrapped, ("</tool_call>",)), _FUNCTION: Read(_naked, ("</function>", "</tool_call>"))},
    ),
    hidden=("</tool_call>", "</function>", "</think>", "<|im_end|>"),
    inner=(_PARAMETER, "</parameter>"),
    stops=("<|im_end|>",),
    turn=("<|im_start|>assistant",),
    template=((_FUNCTION, _PARAMETER),),
    names=("qwen3-coder", "qwen3.5", "qwen3.6", "qwen3-next-coder"),
)
