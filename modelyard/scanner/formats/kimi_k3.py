"""Kimi K3: tags made of tokens, `<|open|>` name and attributes `<|sep|>` … `<|close|>` name `<|sep|>`.

    <|open|>think<|sep|>I need the weather.<|close|>think<|sep|>
    <|open|>response<|sep|>Let me look.<|close|>response<|sep|>
    <|open|>tools<|sep|>
    <|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>

(in one line). Text stands as it is, every other type as JSON. A call's arguments may also be one JSON object, between
`json` tags. The prompt has opened `think`, or `response`.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import Steps, Tape, Unreadable
from modelyard.scanner.typed import ANY, TypedArguments
from modelyard.scanner.verbatim import verbatim

_OPEN, _SEP, _CLOSE, _END = "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"
_TAG_LIMIT = 512
_OPENED = {"think": "thinking", "response": "text", "message": "text", "tools": None}
_CLOSED = {"think": "text", "response": "text", "message": "text", "tools": None, "call": None, "json": None}
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class Tag:
    """What stands between `<|open|>` or `<|close|>` and `<|sep|>`."""

    def __init__(self, header: str) -> None:
        self.name, _, rest = header.strip().partition(" ")
        self.attributes = {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in _ATTRIBUTE.findall(rest)}


def _tag(tape: Tape) -> Steps[Tag | None]:
    """None: the output ended before the tag did, and what stood there could have been one."""
    sep, others = tape.mark(_SEP), tuple(map(tape.mark, (_OPEN, _CLOSE, _END)))
    taken = ""
    while True:
        char = yield from tape.peek()
        here = (yield from tape.stands((sep, *others))) if char else ""
        if here == sep:
            tape.skip(len(sep))
            return Tag(taken)
        if here == "" and any(name.startswith(Tag(taken).name) for name in (*_CLOSED, "argument")):
            return None
        if here is not None or len(taken) >= _TAG_LIMIT or char == "\n":
            raise Unreadable("no tag stands here")
        taken += tape.skip(1)


def _opens(tape: Tape, calls: Calls) -> Steps[str | None]:
    tag = yield from _tag(tape)
    if tag is None:
        return None
    if tag.name == "call":
        yield from _call(tape, calls, tag)
    elif tag.name not in _OPENED:
        raise Unreadable("an unknown tag")
    return _OPENED.get(tag.name)


def _closes(tape: Tape, _: Calls) -> Steps[str | None]:
    tag = yield from _tag(tape)
    if tag and tag.name not in (*_CLOSED, "argument"):
        raise Unreadable("an unknown tag")
    return _CLOSED.get(tag.name) if tag else None


def _call(tape: Tape, calls: Calls, tag: Tag) -> Steps[None]:
    calls.name(tag.attributes.get("tool", ""))
    arguments = TypedArguments(calls)
    opening = (tape.mark(_OPEN),)
    while True:
        yield from tape.space()
        if not (yield from tape.stands(opening)):
            break
        tape.skip(len(opening[0]))
        inner = yield from _tag(tape)
        if inner and inner.name == "json":
            return (yield from json_arguments(tape, calls))
        yield from _argument(tape, arguments, inner)
    if (yield from tape.stands((tape.mark(_CLOSE), tape.mark(_END)))) or (tape.is_empty and not tape.cut):
        return arguments.close()
    raise Unreadable("neither an argument nor the end of the call")


def _argument(tape: Tape, arguments: TypedArguments, tag: Tag | None) -> Steps[None]:
    if tag is None or tag.name != "argument" or "key" not in tag.attributes:
        raise Unreadable("no argument stands here")
    key = tag.attributes["key"]
    arguments.begin(key, _types(arguments.allowed(key), tag.attributes.get("type", "string")))
    close = f"{tape.mark(_CLOSE)}argument{tape.mark(_SEP)}"
    end = yield from verbatim(tape, (close,), arguments.text)
    if not end and tape.cut:
        raise Unreadable("cut off inside an argument")
    tape.skip(len(end))
    arguments.end()


def _types(allowed: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """The tag says only whether it is text; the schema says more, unless it allows something else altogether."""
    if kind == "string":
        return ("string",) if "string" in allowed else allowed
    return tuple(one for one in allowed if one != "string") or allowed or ANY


_MARKS: dict[str, SwitchRegion | StartReader] = {
    _OPEN: StartReader(_opens, (_END,)),
    _CLOSE: StartReader(_closes),
    _END: SwitchRegion("text"),
}

FORMAT = OutputFormat(
    name="kimi_k3",
    regions={"text": Region("text", _MARKS), "thinking": Region("thinking", _MARKS)},
    hidden=(_SEP,),
    stops=(_END,),
    turn=(_END, '<|open|>message role="assistant"<|sep|>'),
    template=((_OPEN, _CLOSE, _END),),
    names=("kimi-k3", "kimi_k3"),
)
