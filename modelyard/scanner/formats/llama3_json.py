"""Llama 3.1 to 3.3: calls as bare JSON, one after another, with `parameters` in place of arguments.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}
    <|python_tag|>{"type": "function", "name": "now", "parameters": {}}
    <|python_tag|>brave_search.call(query="weather in Paris")
    <|python_tag|>print(2 + 2)
    <function=get_weather>{"city": "Paris"}</function>

Without the token, JSON is a call only if it names a tool on offer and has arguments. After the token also come the
tools that Llama was trained with, and code: a call of the tool `python`, `ipython` or `code_interpreter`, if one of
them is on offer, else text. The last form is the one that Meta's guide teaches for custom tools; so writes Functionary.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._functions import END, FUNCTION, Functions
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.grammar import JsonBody, Shape
from modelyard.scanner.json_calls import JsonCall
from modelyard.scanner.lexer import BRACKET, Steps, Tape, Unreadable
from modelyard.scanner.naked_json import CertainCall
from modelyard.scanner.pythonic_calls import call_arguments
from modelyard.scanner.typed import TypedArguments
from modelyard.scanner.verbatim import verbatim

_TAG, _ENDS = "<|python_tag|>", ("<|eom_id|>", "<|eot_id|>")
_INTERPRETERS = ("python", "ipython", "code_interpreter")
_BUILT_IN = re.compile(r"\s*([\w-]+)\.call\(")
_HEAD = 96  # longer than any of those names


def _object(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `{`."""
    yield from CertainCall(tape, calls).opened()
    return (yield from _more(tape, calls, CertainCall))


def _list(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `[`."""
    yield from tape.space()
    if (yield from tape.peek()) != "{":
        raise Unreadable("no call stands here")
    with BRACKET:
        yield from CertainCall(tape, calls).read()
    return (yield from _more(tape, calls, CertainCall, listed=True))


def _more(tape: Tape, calls: Calls, one: type[JsonCall], *, listed: bool = False) -> Steps[str | None]:
    """What stands between calls is theirs; before anything else it is given back."""
    separators = ",;}" + ("]" if listed else "")
    tape.kept = []
    while True:
        yield from tape.space()
        char = yield from tape.peek()
        if char == "{":
            yield from one(tape, calls).read()
            tape.kept = []
        elif not char:
            return None
        elif char in separators:
            tape.skip(1)
        else:
            raise Unreadable("no further call stands here")


def _tagged(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `<|python_tag|>`."""
    yield from tape.space()
    char = yield from tape.peek()
    if char in ("{", "["):
        tape.skip(1 if char == "[" else 0)
        yield from tape.space()
        yield from JsonCall(tape, calls).read()
        return (yield from _more(tape, calls, JsonCall, listed=char == "["))
    if found := _BUILT_IN.match((yield from tape.ahead(_HEAD))):
        tape.skip(found.end())
        calls.name(found[1])
        yield from call_arguments(tape, calls)
    else:
        yield from _code(tape, calls)
    return None


def _code(tape: Tape, calls: Calls) -> Steps[None]:
    """Everything up to the end of the turn, for whoever runs code."""
    for name in _INTERPRETERS:
        calls.name(name)
        if calls.tool is not None:
            break
    else:
        raise Unreadable("nobody runs code")
    arguments = TypedArguments(calls)
    arguments.begin(next(iter(arguments.properties), "code"), ("string",))
    if not (yield from verbatim(tape, tuple(map(tape.mark, _ENDS)), arguments.text)) and tape.cut:
        raise Unreadable("cut off inside code")
    arguments.end()
    arguments.close()


_CALL = Shape(body=JsonBody('{"name": "', '", "parameters": ', "}"), between="; ")

_MARKS = {
    _TAG: StartReader(_tagged, _ENDS),
    FUNCTION: Functions(_TAG, _ENDS[0]).marks[FUNCTION],
    "{": StartReader(_object, naked=True),
    "[": StartReader(_list, naked=True),
}

FORMAT = OutputFormat(
    name="llama3_json",
    regions=regions(THINK, _MARKS),
    hidden=("</think>", END, *_ENDS),
    stops=_ENDS,
    turn=("<|start_header_id|>assistant<|end_header_id|>",),
    template=tuple(("<|start_header_id|>", sign) for sign in ('"parameters": ', _TAG, FUNCTION)),
    names=("llama-3.1", "llama-3.2", "llama-3.3", "llama3.1", "llama3.2", "llama3.3"),
    grammar=_CALL.grammar,
)
