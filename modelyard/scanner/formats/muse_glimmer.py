"""Messages with a recipient, and calls as tags in those that go to a tool: Muse Glimmer.

    <|start|>assistant to=self<|message|>I need the weather.<|eom|>
    <|start|>assistant to=user<|message|>Let me look.<|eom|>
    <|start|>assistant to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

`self` gets the reasoning, `user` the text. The prompt has written `<|start|>assistant`; models forget it before later
messages too. Tags in a message to anybody but a tool are talk about calls, unless they are the first thing in the text:
then the header was forgotten. Only `<|eot|>` ends the turn.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._invoke import tagged
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.verbatim import verbatim

_START, _TO, _MESSAGE, _ENDS = "<|start|>", "to=", "<|message|>", ("<|eom|>", "<|eot|>")
_DIALECT = tagged("<atem:", "</atem:", ("function_calls",), plain_block=False, plain_invoke=False)
_CALLS = _DIALECT.marks()
_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=([\w.:/-]*))?\s*")
_HEADER_END = re.compile(rf"[<\n{SURROGATES}]")
_HEADER_LIMIT = 256
_REGIONS = {None: "text", "": "text", "user": "text", "self": "thinking"}


def _header(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `<|start|>`, or after the prompt."""
    head = yield from _until_marker(tape)
    found = _HEADER.fullmatch(head)
    if not found:
        raise Unreadable("no header")
    return (yield from _body(tape, calls, found[1]))


def _bare(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `to=`: a header if nothing but a name stands before the body."""
    found = _HEADER.fullmatch(_TO + (yield from _until_marker(tape)))
    if not found or not (yield from tape.stands((tape.mark(_MESSAGE),))):
        raise Unreadable("words like any others")
    return (yield from _body(tape, calls, found[1]))


def _until_marker(tape: Tape) -> Steps[str]:
    """The header's text; at the end of the output perhaps only half of it."""
    taken = ""
    while True:
        found = _HEADER_END.search(tape.text, tape.at)
        taken += tape.take(found.start() if found else len(tape.text))
        if len(taken) > _HEADER_LIMIT:
            raise Unreadable("too long for a header")
        if found or tape.ended:
            return taken if found or not "assistant".startswith(taken) else ""
        yield


def _body(tape: Tape, calls: Calls, recipient: str | None) -> Steps[str | None]:
    if not (here := (yield from tape.stands((tape.mark(_MESSAGE),)))):
        return "text"  # a message without a body
    tape.skip(len(here))
    tape.kept = []
    if recipient not in _REGIONS:
        yield from _to_tool(tape, calls, recipient or "")
        return "text"
    return _REGIONS[recipient]


def _to_tool(tape: Tape, calls: Calls, recipient: str) -> Steps[None]:
    """Calls, perhaps with words around them, or the bare arguments of the one that the header names."""
    yield from tape.space()
    if (yield from tape.peek()) == "{":
        calls.name(recipient)
        return (yield from json_arguments(tape, calls))
    openings = {tape.mark(mark): act for mark, act in _CALLS.items()}
    ends = (*openings, *map(tape.mark, (*_ENDS, _START)))
    while True:
        words: list[str] = []
        end = yield from verbatim(tape, ends, words.append)
        if "".join(words).strip():
            calls.say("".join(words))
            tape.kept = []
        if end not in openings:
            return
        tape.skip(len(end))
        yield from openings[end].reader(tape, calls)


def _forgotten(mark: str) -> StartReader:
    """A call without a header counts only where a text begins."""

    def read(tape: Tape, calls: Calls) -> Steps[str | None]:
        if calls.kind != "text" or not calls.is_first:
            raise Unreadable("talk about a call")
        return (yield from _CALLS[mark].reader(tape, calls))

    return StartReader(read, _CALLS[mark].close, naked=True)


_MARKS: dict[str, SwitchRegion | StartReader] = {
    _START: StartReader(_header, _ENDS),
    _TO: StartReader(_bare, _ENDS, naked=True),
    **{mark: _forgotten(mark) for mark in _CALLS},
    **{end: SwitchRegion("text") for end in _ENDS},
}

FORMAT = OutputFormat(
    name="muse_glimmer",
    regions={"text": Region("text", _MARKS), "thinking": Region("thinking", _MARKS)},
    hidden=(_MESSAGE,),
    inner=(_DIALECT.tags.opening, _DIALECT.tags.closing, *_DIALECT.tags.ends),
    stops=("<|eot|>",),
    turn=_ENDS,
    template=(("<atem:function_calls>",), ("<atem:function_calls>", "<|eom|>")),
    names=("muse-glimmer", "muse_glimmer"),
)
