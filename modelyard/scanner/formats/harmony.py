"""Messages with a header that names a channel: gpt-oss and what speaks its protocol.

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

`analysis` is reasoning; `final`, and `commentary` that is addressed to nobody, is text; what has a recipient is a call.
The recipient may also stand before the channel (`<|start|>assistant to=functions.x<|channel|>…`). A message of an
unknown channel is held and then given as text. Only `<|return|>` and `<|call|>` end a turn; `<|constrain|>` belongs to
the header.
"""

from __future__ import annotations

import re
from functools import partial

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.grammar import JsonBody, Shape
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import Steps, Tape, Unreadable, one_of

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CLOSERS = (*_ENDS, _START, _CHANNEL)
_HEADER_LIMIT = 256
_REGIONS = {"analysis": "thinking", "final": "text", "commentary": "text", "": "text"}
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")
_SHAPE = re.compile(r"\s*(?:assistant)?\s*(?:to=\S*)?\s*")
_WORDS = ("assistant", "to=", "analysis", "final", "commentary")


def _header(tape: Tape, calls: Calls, *, in_channel: bool) -> Steps[str | None]:
    """From `<|start|>` or `<|channel|>` to the body, which decides what follows."""
    header, channel = "", ""
    while True:
        part, marker = yield from _part(tape, _HEADER_LIMIT - len(header))
        header += part + " "
        if in_channel:
            channel = part.strip().partition(" ")[0]
        in_channel = marker == tape.mark(_CHANNEL)
        if marker == tape.mark(_MESSAGE):
            break
        if marker not in (tape.mark(_CHANNEL), tape.mark(_CONSTRAIN)):
            return _unfinished(header)
        tape.skip(len(marker))
    tape.skip(len(marker))
    tape.kept = []
    return (yield from _body(tape, calls, channel, _RECIPIENT.search(header)))


def _part(tape: Tape, limit: int) -> Steps[tuple[str, str]]:
    """Header text up to the next marker (empty: the output is over)."""
    markers = tuple(map(tape.mark, (*_CLOSERS, _CONSTRAIN, _MESSAGE)))
    taken = ""
    while True:
        char = yield from tape.peek()
        here = (yield from tape.stands(markers)) if char else ""
        if here is not None:
            return taken, here
        if len(taken) >= limit or char == "\n":
            raise Unreadable("no header")
        taken += tape.skip(1)


def _unfinished(header: str) -> str:
    """A message that has no body. Its header is protocol, unless it looks like something that was meant to be read."""
    words = _SHAPE.sub("", header, count=1).split()
    if words and not any(known.startswith(words[0]) for known in _WORDS):
        raise Unreadable("no header")
    return "text"


def _body(tape: Tape, calls: Calls, channel: str, to: re.Match[str] | None) -> Steps[str | None]:
    if to and to[1] != "assistant":
        calls.name(to[1].removeprefix("functions."))
        yield from _arguments(tape, calls)
        return "text"
    if channel not in _REGIONS:
        calls.say((yield from _rest(tape)))
        return "text"
    return _REGIONS[channel]


def _arguments(tape: Tape, calls: Calls) -> Steps[None]:
    closers = tuple(map(tape.mark, _CLOSERS))
    yield from tape.space()
    char = yield from tape.peek()
    if char == "{" and not calls.is_custom:
        yield from json_arguments(tape, calls)
    elif calls.is_custom or char == "" or (yield from tape.stands(closers)):
        text = yield from _rest(tape)
        if tape.cut and tape.ended and tape.is_empty:
            raise Unreadable("cut off inside a call")
        calls.put(text if calls.is_custom else "{}")
        calls.close()
    else:
        yield from _rest(tape)
        raise Unreadable("arguments are an object")


def _rest(tape: Tape) -> Steps[str]:
    """The body up to the marker that ends it."""
    closers = tuple(map(tape.mark, _CLOSERS))
    first = one_of(frozenset(c[0] for c in closers))
    taken = []
    while (yield from tape.peek()):
        found = first.search(tape.text, tape.at)
        taken.append(tape.take(found.start() if found else len(tape.text)))
        if found:
            if (yield from tape.stands(closers)):
                break
            taken.append(tape.skip(1))
    return "".join(taken)


_MARKS: dict[str, SwitchRegion | StartReader] = {
    _START: StartReader(partial(_header, in_channel=False), _ENDS),
    _CHANNEL: StartReader(partial(_header, in_channel=True), _ENDS),
    **{end: SwitchRegion("text") for end in _ENDS},
}

_CALL = Shape(
    body=JsonBody("", " <|constrain|>json<|message|>"),
    opening="<|channel|>commentary to=functions.",
    closing="<|call|>",
    trigger="<|channel|>commentary to=functions.",
    thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    several=False,
)

FORMAT = OutputFormat(
    name="harmony",
    regions={"text": Region("text", _MARKS), "thinking": Region("thinking", _MARKS)},
    hidden=(_CONSTRAIN, _MESSAGE),
    turn=_ENDS,
    stops=("<|return|>", "<|call|>"),
    template=((_CHANNEL, _MESSAGE),),
    names=("gpt-oss", "gpt_oss", "harmony"),
    grammar=_CALL.grammar,
)
