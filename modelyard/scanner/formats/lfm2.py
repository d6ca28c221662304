"""Calls as Python, in a list between tokens: LFM2 and LFM2.5.

    <think>I need the weather.</think>I will look.<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>

A system text that asks for JSON gets it: `<|tool_call_start|>[{"name": …, "arguments": {…}}]<|tool_call_end|>`. The
models like to repeat the list once more after its end, up to a second end token: that echo is dropped.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.pythonic_calls import listed_calls

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_AFTER_NAME = re.compile(r"[^\w.\s-]")
_NAME_LIMIT = 128
_SPACE_LIMIT = 16
_TAG = re.compile(f"[<{SURROGATES}]")


def _calls(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    if (yield from tape.peek()) == "[":
        tape.skip(1)
        yield from tape.space()
    read = json_calls if (yield from tape.peek()) == "{" else listed_calls
    yield from read(tape, calls)
    if end := (yield from tape.stands((tape.mark(_END),))):
        tape.skip(len(end))
        yield from _echo(tape)
    return None


def _echo(tape: Tape) -> Steps[None]:
    if (yield from _first_char(tape)) != "[":
        return
    tape.kept = []
    yield from tape.space()
    tape.skip(1)
    yield from tape.until(_AFTER_NAME, _NAME_LIMIT)
    if (yield from tape.peek()) not in ("(", "{"):
        raise Unreadable("text, no echo")
    yield from _second_end(tape)


def _first_char(tape: Tape) -> Steps[str]:
    """Behind a little white space, which is not taken: it may belong to the text."""
    for count in range(1, _SPACE_LIMIT):
        ahead = yield from tape.ahead(count)
        if not ahead[count - 1 :].isspace():
            return ahead[count - 1 :]
    return ""


def _second_end(tape: Tape) -> Steps[None]:
    marks = tuple(map(tape.mark, (_END, _START, "<|im_end|>")))
    while (yield from tape.peek()):
        found = _TAG.search(tape.text, tape.at)
        tape.take(found.start() if found else len(tape.text))
        here = (yield from tape.stands(marks)) if found else None
        if here == marks[0]:
            tape.skip(len(here))
            return
        if here:
            break
        tape.skip(1 if found else 0)
    raise Unreadable("text, no echo")


FORMAT = OutputFormat(
    name="lfm2",
    regions=regions(THINK, {_START: StartReader(_calls, (_END,))}),
    hidden=(_END, "<|im_end|>"),
    stops=("<|im_end|>",),
    turn=("<|im_start|>assistant",),
    template=(("<|tool_list_start|>",), ("<|tool_call_start|>",), ("List of tools: [",)),
    names=("lfm2",),
)
