"""Calls of the GLM family: a bare name, then keys and values in tags of their own, which are tokens.

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>

Values are text as it is, or JSON for everything else. With white space between the tags or without is the only
difference between the versions. Under load the models drop or repeat one tag: a value without its opening, a stray
closing tag behind the name, a call that is never closed. All of these are read.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import NAME_LIMIT, closable, function_name
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.parameters import Tags, Value
from modelyard.scanner.typed import ANY, TypedArguments

CALL, _END = "<tool_call>", "</tool_call>"
KEY, VALUE, _KEY_END, _VALUE_END = "<arg_key>", "<arg_value>", "</arg_key>", "</arg_value>"
_TAGS = Tags(KEY, _KEY_END, _VALUE_END, (_END,), (CALL,), lines=False)
_NAME_END = re.compile(rf"[\n<{{{SURROGATES}]")
_KEY_STOP = re.compile(rf"[<{SURROGATES}]")
_SPACE_LIMIT = 64
_LINE = "\\n"  # some write the line break as two characters
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

HIDDEN = (_END, "<|endoftext|>", *_ROLES)
INNER = (KEY, VALUE, _KEY_END, _VALUE_END)
STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")
TURN = ("<|assistant|>",)


def _call(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    if (yield from tape.peek()) in ("{", "["):
        return (yield from json_calls(tape, calls))
    calls.name(function_name((yield from _name(tape)).removesuffix(_LINE)))
    yield from _pass(tape, _KEY_END, _VALUE_END)
    if (yield from tape.peek()) == "{":
        yield from json_arguments(tape, calls)
    else:
        yield from _arguments(tape, calls)
    yield from _pass(tape, _END)
    return None


def _name(tape: Tape) -> Steps[str]:
    """Up to the first tag or line break; at the end of the output what stands there may be all there is."""
    taken = ""
    while True:
        found = _NAME_END.search(tape.text, tape.at)
        taken += tape.take(found.start() if found else len(tape.text))
        if len(taken) > NAME_LIMIT:
            raise Unreadable("too long for a name")
        if found or tape.ended:
            return taken
        yield


def _arguments(tape: Tape, calls: Calls) -> Steps[None]:
    arguments = TypedArguments(calls)
    key, others = tape.mark(KEY), tuple(map(tape.mark, (_END, CALL)))
    while True:
        yield from tape.space()
        here = yield from tape.stands((key, *others))
        if here == key:
            tape.skip(len(here))
            yield from _argument(tape, arguments)
        elif here or ((yield from tape.peek()) == "" and _may_end(tape, calls, arguments)):
            return arguments.close()
        else:
            raise Unreadable("neither an argument nor the end of the call")


def _may_end(tape: Tape, calls: Calls, arguments: TypedArguments) -> bool:
    """The output is over. A name alone is a call only if such a tool was offered."""
    return not tape.cut and (bool(arguments.given) or calls.tool is not None)


def _argument(tape: Tape, arguments: TypedArguments) -> Steps[None]:
    yield from _pass(tape, KEY)
    name = (yield from tape.until(_KEY_STOP, NAME_LIMIT)).strip()
    if not (yield from tape.stands(tuple(map(tape.mark, (_KEY_END, VALUE))))):
        raise Unreadable("a key without an end")
    yield from _pass(tape, _KEY_END, _LINE)
    yield from _skip(tape, VALUE)
    arguments.begin(name, arguments.allowed(name) or ANY)
    if not (yield from Value(tape, _TAGS, arguments).read()) and tape.cut:
        raise Unreadable("cut off inside a value")
    arguments.end()


def _pass(tape: Tape, *tags: str) -> Steps[None]:
    """Skip these tags, as often as they stand here."""
    while (yield from _skip(tape, *tags)):
        pass


def _skip(tape: Tape, *tags: str) -> Steps[bool]:
    """Skip one of these tags, and the white space in front of it."""
    offset = 0
    while offset < _SPACE_LIMIT and (char := (yield from tape.ahead(offset + 1))[offset:]) and char.isspace():
        offset += 1
    here = yield from tape.stands(tuple(map(tape.mark, tags)), offset)
    if here:
        tape.skip(offset + len(here))
    return here is not None


CALLS = {CALL: StartReader(_call, (_END,))}
REGIONS = closable(CALLS)
