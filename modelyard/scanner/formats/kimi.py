"""Kimi.

`kimi_k2`: K2 writes every call between tokens, with its name in an id that counts the calls:

    <think>I need the weather.</think>Let me look.<|tool_calls_section_begin|>
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
    <|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>

The tokens around the section and those that end a call are often missing. Some versions write `tool_call_section`. A
tool without arguments may be called by its id alone. An id without a name (`0`, `call_3`) means the only offered tool
that accepts the arguments.

`kimi_k3`: K3 writes tags made of tokens, `<|open|>` name and attributes `<|sep|>` … `<|close|>` name `<|sep|>`:

    <|open|>think<|sep|>I need the weather.<|close|>think<|sep|>
    <|open|>response<|sep|>Let me look.<|close|>response<|sep|>
    <|open|>tools<|sep|>
    <|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>

(In one line.) Text is written unchanged, every other type as JSON. The arguments of a call may also be one JSON object
between `json` tags. The prompt opens `think` or `response`. A missing `<|sep|>` is implied.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, ReasoningBlock, Region, StartReader, SwitchRegion
from modelyard.scanner.arguments import ANY_TYPE, ArgumentWriter, ParameterTags, read_value
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import CallSyntax, JsonBody, TaggedBody
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lenient_json import JsonReader
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

# --- K2 ---------------------------------------------------------------------------------------------------------------

_BEGIN, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTIONS = tuple(f"<|{word}_section_{end}|>" for word in ("tool_calls", "tool_call") for end in ("begin", "end"))
_ID_END = re.compile(rf"[<{{\n{SURROGATES}]")
_ID_LIMIT = 256
_COUNT = re.compile(r":\d+\Z")
_ID_WITHOUT_NAME = re.compile(r"(?:\d+|(?:call|tool|toolu|chatcmpl)[_-][\w-]*\d[\w-]*)\Z")
_NAME = re.compile(r"[\w.:/-]*[\w-]\Z")


def _read_call(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    call_id = (yield from buffer.read_until(_ID_END, _ID_LIMIT)).strip()
    name = _COUNT.sub("", call_id).removeprefix("functions.")
    yield from buffer.skip_space()
    if not (yield from buffer.is_next(_ARGUMENTS, _CALL_END)) or not _NAME.match(name):
        raise ParseError("expected an id")
    calls.start(name)
    has_arguments = yield from buffer.skip_if(_ARGUMENTS)
    yield from buffer.skip_space()
    if not calls.is_offered and _ID_WITHOUT_NAME.match(name):
        parts: list[str] = []
        yield from JsonReader(buffer, parts.append).read()
        arguments = "".join(parts)
        calls.start(calls.find_tool(arguments) or name)
        calls.finish(arguments)
        return None
    if not has_arguments and (name == call_id or not calls.is_offered):
        raise ParseError("no arguments: this may be prose")
    if (yield from buffer.is_next(_CALL_END, _BEGIN)):
        calls.finish("{}")
    else:
        yield from json_arguments(buffer, calls)
    return None


_K2 = OutputFormat(
    name="kimi_k2",
    results=("## Return of {id}\n", ""),
    regions=regions({_BEGIN: StartReader(_read_call, (_CALL_END,))}),
    hidden_markers=(_ARGUMENTS, _CALL_END, *_SECTIONS, "</think>", "<|im_end|>"),
    stop_tokens=("<|im_end|>",),
    turn_starts=("<|im_middle|>",),
    template_hints=((_BEGIN, _ARGUMENTS),),
    name_hints=("kimi-k2", "kimi_k2"),
    calls=CallSyntax(JsonBody("functions.", f":{{at}}{_ARGUMENTS}"), _SECTIONS[0], _SECTIONS[1], _BEGIN, _CALL_END, ""),
)

# --- K3 ---------------------------------------------------------------------------------------------------------------

_OPEN, _SEP, _CLOSE, _END = "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"
_TAG_LIMIT = 512
_REGION_OPENED = {"think": "thinking", "response": "text", "message": "text", "tools": None}
_REGION_CLOSED = {"think": "text", "response": "text", "message": "text", "tools": None, "call": None, "json": None}
_CLOSING_NAMES = (*_REGION_CLOSED, "argument")
_KNOWN_TAG = re.compile(r'\s*(?:think|response|message|tools|call|argument|json)(?:\s+\w+="[^"]*")*')
_CUT_TAG = re.compile(r'(?:\s+\w*(?:=(?:"[^"]*)?)?)?\Z')
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_K3_TAGS = ParameterTags(
    f"{_OPEN}argument",
    _SEP,
    f"{_CLOSE}argument",
    ends=(f"{_CLOSE}call", f"{_CLOSE}tools", f"{_CLOSE}message"),
    after=(f"{_OPEN}call", f"{_OPEN}tools"),
    on_lines=False,
    after_tags=_SEP,
    name=lambda header: dict(_ATTRIBUTE.findall(header)).get("key", ""),
)


class _Tag:
    """The text between `<|open|>` or `<|close|>` and `<|sep|>`."""

    def __init__(self, header: str) -> None:
        self.name, _, rest = header.strip().partition(" ")
        self.attributes = {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in _ATTRIBUTE.findall(rest)}


def _read_tag(buffer: TextBuffer) -> Incremental[_Tag | None]:
    """None: the output ended inside what could be a tag. The separator may be missing."""
    if (found_tag := (yield from _match_tag(buffer))) is not None:
        tag = _Tag(buffer.take_to(found_tag.end()))
        yield from buffer.skip_if(_SEP)
        buffer.commit()
        return tag
    markers = tuple(map(buffer.encoded, (_SEP, _OPEN, _CLOSE, _END)))
    header, found = yield from buffer.read_header(markers, _TAG_LIMIT)
    tag = _Tag(header)
    if found == markers[0]:
        buffer.skip(len(found))
        return tag
    if found or not any(name.startswith(tag.name) for name in _CLOSING_NAMES):
        raise ParseError("expected a tag")
    return None


def _match_tag(buffer: TextBuffer) -> Incremental[re.Match[str] | None]:
    """A known name and its attributes, once it is certain that no more of them follow."""
    ends = tuple(map(buffer.encoded, (_SEP, _OPEN, _CLOSE, _END)))
    while True:
        limit = min(len(buffer.text), buffer.pos + _TAG_LIMIT)
        markers = [at for end in ends if (at := buffer.text.find(end, buffer.pos, limit)) >= 0]
        if markers or buffer.ended or len(buffer.text) - buffer.pos >= _TAG_LIMIT:
            break
        yield
    found = _KNOWN_TAG.match(buffer.text, buffer.pos, min(markers, default=limit))
    return None if found and not markers and _CUT_TAG.match(buffer.text, found.end(), limit) else found


def _read_opening(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    tag = yield from _read_tag(buffer)
    if tag is None:
        return None
    if tag.name == "call":
        yield from _read_tagged_call(buffer, calls, tag)
    elif tag.name not in _REGION_OPENED:
        raise ParseError("an unknown tag")
    return _REGION_OPENED.get(tag.name)


def _read_closing(buffer: TextBuffer, _: CallBuilder) -> Incremental[str | None]:
    tag = yield from _read_tag(buffer)
    if tag and tag.name not in _CLOSING_NAMES:
        raise ParseError("an unknown tag")
    return _REGION_CLOSED.get(tag.name) if tag else None


def _read_tagged_call(buffer: TextBuffer, calls: CallBuilder, tag: _Tag) -> Incremental[None]:
    calls.start(tag.attributes.get("tool", ""))
    arguments = ArgumentWriter(calls)
    yield from buffer.skip_space()
    while (yield from buffer.skip_if(_OPEN)):
        inner = yield from _read_tag(buffer)
        if inner is None:
            buffer.commit()  # the output ends inside of the tag
        if inner and inner.name == "json":
            return (yield from json_arguments(buffer, calls))
        yield from _read_argument(buffer, arguments, inner)
        yield from buffer.skip_space()
    if (yield from buffer.is_next(_CLOSE, _END)):
        arguments.finish()
    elif buffer.is_empty:
        arguments.finish_at_end(buffer)
    else:
        raise ParseError("expected an argument or the end of the call")


def _read_argument(buffer: TextBuffer, arguments: ArgumentWriter, tag: _Tag | None) -> Incremental[None]:
    if tag is None or tag.name != "argument" or "key" not in tag.attributes:
        raise ParseError("expected an argument")
    key, allowed = tag.attributes["key"], arguments.types_of(tag.attributes["key"])
    # The tag only says whether the value is text. The schema says more, unless it allows something else altogether.
    if tag.attributes.get("type", "string") == "string":
        types = ("string",) if "string" in allowed else allowed
    else:
        types = tuple(one for one in allowed if one != "string") or allowed or ANY_TYPE
    yield from read_value(buffer, _K3_TAGS, arguments, key, types)
    yield from buffer.skip_if(_SEP)


_K3_MARKERS: dict[str, SwitchRegion | StartReader] = {
    _OPEN: StartReader(_read_opening, (_END,)),
    _CLOSE: StartReader(_read_closing),
    _END: SwitchRegion("text"),
}

_K3 = OutputFormat(
    name="kimi_k3",
    regions={"text": Region("text", _K3_MARKERS), "thinking": Region("thinking", _K3_MARKERS)},
    hidden_markers=(_SEP,),
    has_messages=True,
    messages_of_reasoning=(
        ReasoningBlock(
            f"{_OPEN}think{_SEP}",
            (f"{_CLOSE}think", _END),
            f"{_CLOSE}think{_SEP}{_OPEN}response{_SEP}",
        ),
    ),
    stop_tokens=(_END,),
    turn_starts=(_END, '<|open|>message role="assistant"<|sep|>'),
    template_hints=((_OPEN, _CLOSE, _END),),
    name_hints=("kimi-k3", "kimi_k3"),
    calls=CallSyntax(
        TaggedBody("", f'{_OPEN}argument key="{{}}" type="{{type}}"{_SEP}', f"{_CLOSE}argument{_SEP}"),
        begin=f"{_OPEN}tools{_SEP}",
        end=f"{_CLOSE}tools{_SEP}",
        opening=f'{_OPEN}call tool="{{name}}" index="{{number}}"{_SEP}',
        closing=f"{_CLOSE}call{_SEP}",
        between="",
    ),
)

FORMATS = (_K2, _K3)
