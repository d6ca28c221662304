"""Calls as XML with attributes, one parameter an element, every value as text: MiniCPM 5.

    <think>
    I need the weather.
    </think>

    <function name="get_weather"><param name="city">Paris</param><param name="days">3</param></function>

A value with `<`, `&` or a line break stands between `<![CDATA[` and `]]>`, where it is exact.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value, parameter_name
from modelyard.scanner.typed import ANY, TypedArguments

_FUNCTION, _END, _PARAM, _PARAM_END = "<function name=", "</function>", "<param name=", "</param>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_TAGS = Tags(_PARAM, ">", _PARAM_END, (_END,), (_FUNCTION,))
_NAME_END = re.compile(rf"[>\n<{SURROGATES}]")
_NAME_LIMIT = 128
_BRACKET = re.compile(rf"[\]{SURROGATES}]")


def _function(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `<function name=`."""
    name, is_empty = yield from _name(tape)
    calls.name(name)
    arguments = TypedArguments(calls)
    if is_empty:
        arguments.close()
        return None
    yield from _params(tape, arguments)
    if end := (yield from tape.stands((tape.mark(_END),))):
        tape.skip(len(end))
    return None


def _name(tape: Tape) -> Steps[tuple[str, bool]]:
    """The name, and whether the element ends with its own tag (`/>`)."""
    raw = yield from tape.until(_NAME_END, _NAME_LIMIT)
    if (yield from tape.peek()) != ">":
        raise Unreadable("a tag without an end")
    tape.skip(1)
    return parameter_name(raw.rstrip("/")), raw.endswith("/")


def _params(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    param, closers = tape.mark(_PARAM), tuple(map(tape.mark, (_END, _FUNCTION)))
    while True:
        yield from tape.space()
        here = yield from tape.stands((param, *closers))
        if here == param:
            tape.skip(len(here))
            yield from _param(tape, arguments)
        elif here or ((yield from tape.peek()) == "" and not tape.cut):
            return arguments.close()
        else:
            raise Unreadable("neither a parameter nor the end of the call")


def _param(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    name, is_empty = yield from _name(tape)
    arguments.begin(name, arguments.allowed(name) or ANY)
    if not is_empty and not (yield from _value(tape, arguments)) and tape.cut:
        raise Unreadable("cut off inside a parameter")
    arguments.end()


def _value(tape: Tape, arguments: TypedArguments) -> Steps[bool]:
    if not (yield from tape.stands((_CDATA,))):
        return (yield from Value(tape, _TAGS, arguments).read())
    tape.skip(len(_CDATA))
    if not (yield from _exact(tape, arguments)):
        return False
    yield from tape.space()
    if end := (yield from tape.stands((tape.mark(_PARAM_END),))):
        tape.skip(len(end))
    return True


def _exact(tape: Tape, arguments: TypedArguments) -> Steps[bool]:
    """Up to `]]>`. False: the output ended before it."""
    while (yield from tape.peek()):
        found = _BRACKET.search(tape.text, tape.at)
        arguments.text(tape.take(found.start() if found else len(tape.text)))
        if found and (yield from _closes(tape)):
            return True
        if found:
            arguments.text("" if found.group() in tape.special else tape.text[tape.at])
            tape.skip(1)
    return False


def _closes(tape: Tape) -> Steps[bool]:
    """The text itself may hold `]]>`: it is the end only where the element ends too."""
    if not (yield from tape.stands((_CDATA_END,))):
        return False
    follows = yield from tape.stands((tape.mark(_PARAM_END),), len(_CDATA_END))
    if follows or (tape.ended and len(tape.text) - tape.at == len(_CDATA_END)):
        tape.skip(len(_CDATA_END))
        return True
    return False


FORMAT = OutputFormat(
    name="minicpm5",
    regions=regions(THINK, {_FUNCTION: StartReader(_function, (_END,))}),
    hidden=(_END, "<|im_end|>"),
    inner=(_PARAM, _PARAM_END, _CDATA),
    stops=("<|im_end|>", "</s>"),
    turn=("<|im_start|>assistant",),
    template=((_FUNCTION, _PARAM),),
    names=("minicpm5", "minicpm-5"),
)
