"""Calls between DeepSeek's own tokens: a name, a separator, JSON. Versions differ in what stands before the separator.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Either form of a call is read whatever the version, since fine-tunes mix them. The outer pair, the inner pair and the
code fence may all be missing.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import DEEPSEEK_ROLES, DEEPSEEK_TURN_END, NAME_LIMIT, function_name
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable

BEGIN, ONE, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
OUTPUTS = ("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")
_FENCE = "```"
_HEAD_END = re.compile(rf"[<{{\n{SURROGATES}]")
_NAME_END = re.compile(rf"[\n`{{<{SURROGATES}]")

HIDDEN = (SEPARATOR, *_ENDS, *OUTPUTS, DEEPSEEK_TURN_END, *DEEPSEEK_ROLES)
STOPS = (DEEPSEEK_TURN_END,)
TURN = ("<｜Assistant｜>", *OUTPUTS[2:])


def _block(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After the outer opening: calls one after another, the first perhaps without an opening of its own."""
    one, end = tape.mark(ONE), tape.mark(_ENDS[1])
    yield from tape.space()
    if not (yield from tape.stands((one,))):
        yield from _call(tape, calls)
    while (yield from tape.stands((one,))):
        tape.skip(len(one))
        yield from _call(tape, calls)
    if (yield from tape.stands((end,))):
        tape.skip(len(end))
    return None


def _call(tape: Tape, calls: Calls) -> Steps[str | None]:
    calls.name(function_name((yield from _name(tape))))
    yield from _fence(tape)
    if (yield from tape.peek()) == "{":
        yield from json_arguments(tape, calls)
    elif (yield from _is_over(tape, calls)):  # perhaps behind an empty code block
        calls.put("{}")
        calls.close()
    else:
        raise Unreadable("arguments are an object")
    yield from _fence(tape)
    if here := (yield from tape.stands((tape.mark(_ENDS[0]),))):
        tape.skip(len(here))
    yield from tape.space()
    return None


def _name(tape: Tape) -> Steps[str]:
    """Before the separator, or between it and the arguments if there only the kind of call stands before it."""
    head = yield from tape.until(_HEAD_END, NAME_LIMIT)
    separator = tape.mark(SEPARATOR)
    if not (yield from tape.stands((separator,))):
        raise Unreadable("a call without a separator")
    tape.skip(len(separator))
    yield from tape.space()
    if (yield from tape.peek()) in ("{", "`", "") or (yield from tape.stands(_marked(tape))):
        return head
    function_name(head)
    return (yield from tape.until(_NAME_END, NAME_LIMIT))


def _fence(tape: Tape) -> Steps[None]:
    """White space, and the opening or closing of a code block."""
    yield from tape.space()
    if (yield from tape.stands((_FENCE,))):
        tape.skip(len(_FENCE))
        if (yield from tape.stands(("json",))):
            tape.skip(4)
        yield from tape.space()


def _is_over(tape: Tape, calls: Calls) -> Steps[bool]:
    """Nothing more belongs to this call: it has no arguments. At the end of the output only a tool on offer is sure."""
    yield from _fence(tape)
    if (yield from tape.stands(_marked(tape))):
        return True
    return (yield from tape.peek()) == "" and not tape.cut and calls.tool is not None


def _marked(tape: Tape) -> tuple[str, ...]:
    return tuple(map(tape.mark, (*_ENDS, ONE)))


CALLS = {BEGIN: StartReader(_block, _ENDS), ONE: StartReader(_call, _ENDS)}
