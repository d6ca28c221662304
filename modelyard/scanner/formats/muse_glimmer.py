"""Muse Glimmer: messages with a recipient, and calls as tags in messages to a tool.

    <|start|>assistant to=self<|message|>I need the weather.<|eom|>
    <|start|>assistant to=user<|message|>Let me look.<|eom|>
    <|start|>assistant to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

Messages to `self` are reasoning, those to `user` are text. The prompt contains `<|start|>assistant`. Models also
forget it before later messages. Tags in other messages are no call, and only the words between them are shown, unless
they are the first thing in the text: then the header is missing. Only `<|eot|>` ends the turn.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, ReasoningBlock, Region, StartReader, SwitchRegion
from modelyard.scanner.arguments import ANY_TYPE
from modelyard.scanner.formats._invoke import InvokeTags
from modelyard.scanner.grammar import CallSyntax, invoke
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_START, _TO, _MESSAGE, _ENDS = "<|start|>", "to=", "<|message|>", ("<|eom|>", "<|eot|>")
_TAGS = InvokeTags("<atem:", "</atem:", ("function_calls",), untyped=ANY_TYPE)
_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=([\w.:/-]*))?\s*")
_HEADER_END = re.compile(rf"[<\n{SURROGATES}]")
_TAG_END = re.compile(rf"[>\n<{SURROGATES}]")
_HEADER_LIMIT = 256
_OPENING = f"{_START}assistant {_TO}{{name}}{_MESSAGE}<atem:function_calls>\n"
_REGIONS = {None: "text", "": "text", "user": "text", "self": "thinking"}


def _read_header(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `<|start|>`."""
    found = _HEADER.fullmatch((yield from _read_header_text(buffer)))
    if not found:
        raise ParseError("expected a header")
    return (yield from _read_body(buffer, calls, found[1]))


def _read_recipient(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `to=`: a header if only a name comes before the body."""
    found = _HEADER.fullmatch(_TO + (yield from _read_header_text(buffer)))
    if not found or not (yield from buffer.is_next(_MESSAGE)):
        raise ParseError("ordinary words")
    return (yield from _read_body(buffer, calls, found[1]))


def _read_header_text(buffer: TextBuffer) -> Incremental[str]:
    """Up to the next marker. At the end of the output it may be incomplete."""
    text = yield from buffer.read_until(_HEADER_END, _HEADER_LIMIT, may_end=True)
    return "" if buffer.is_empty and "assistant".startswith(text) else text


def _read_body(buffer: TextBuffer, calls: CallBuilder, recipient: str | None) -> Incremental[str | None]:
    if not (yield from buffer.skip_if(_MESSAGE)):
        return "text"  # a message without a body
    buffer.commit()
    if recipient not in _REGIONS:
        yield from _read_tool_message(buffer, calls, recipient or "")
        return "text"
    return _REGIONS[recipient]


def _read_tool_message(buffer: TextBuffer, calls: CallBuilder, recipient: str) -> Incremental[None]:
    """Calls, perhaps with words around them, or only the arguments of a call of the recipient."""
    yield from buffer.skip_space()
    if (yield from buffer.peek()) == "{":
        calls.start(recipient)
        return (yield from json_arguments(buffer, calls))
    readers = {buffer.encoded(marker): action.reader for marker, action in _TAGS.readers.items()}
    ends = (*readers, *map(buffer.encoded, (*_ENDS, _START)))
    while True:
        words: list[str] = []
        end = yield from buffer.read_verbatim(ends, words.append)
        if not end and any(marker.startswith("".join(words).strip()) for marker in readers):
            return  # the output ends inside of the tag
        if "".join(words).strip():
            calls.show_message("text", "".join(words))
            buffer.commit()
        if end not in readers:
            return
        buffer.skip(len(end))
        yield from readers[end](buffer, calls)


def _without_header(marker: str, call: StartReader) -> StartReader:
    """A call without a header counts only at the beginning of a text."""

    def read(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        if calls.kind != "text" or not calls.is_first:
            if marker.endswith("="):
                yield from buffer.read_until(_TAG_END, may_end=True)
                yield from buffer.skip_if(">")
            raise ParseError("a quoted call")
        return (yield from call.reader(buffer, calls))

    return StartReader(read, call.closing, bare=True)


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    _START: StartReader(_read_header, _ENDS),
    _TO: StartReader(_read_recipient, _ENDS, bare=True),
    **{marker: _without_header(marker, call) for marker, call in _TAGS.readers.items()},
    **{end: SwitchRegion("text") for end in _ENDS},
}

FORMATS = (
    OutputFormat(
        name="muse_glimmer",
        results=('<tool_output name="{name}">\n', "\n</tool_output>"),
        regions={"text": Region("text", _MARKERS), "thinking": Region("thinking", _MARKERS)},
        hidden_markers=(_MESSAGE,),
        inner_markers=(*_TAGS.readers, _TAGS.parameters.opening, _TAGS.parameters.closing, *_TAGS.parameters.ends),
        has_messages=True,
        messages_of_reasoning=(
            ReasoningBlock(f"{_TO}self{_MESSAGE}", _ENDS, f"{_ENDS[0]}{_START}assistant {_TO}user{_MESSAGE}"),
        ),
        stop_tokens=("<|eot|>",),
        turn_starts=_ENDS,
        template_hints=(("<atem:function_calls>",), ("<atem:function_calls>", "<|eom|>")),
        name_hints=("muse-glimmer", "muse_glimmer"),
        calls=CallSyntax(invoke("atem:"), "", "", _OPENING, "\n</atem:function_calls>", _ENDS[0]),
    ),
)
