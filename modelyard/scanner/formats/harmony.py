"""gpt-oss and other models with the Harmony protocol: messages with a header that names a channel.

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

`analysis` is reasoning. `final`, and `commentary` without a recipient, is text. A message with a recipient is a call.
The recipient may also come before the channel (`<|start|>assistant to=functions.x<|channel|>…`). A message to a tool
that the model was trained with (`to=python`, `to=container.exec`) and that is not offered is reasoning. A message of
an unknown channel is held until its end and shown as text. Only `<|return|>` and `<|call|>` end a turn. `<|constrain|>`
belongs to the header. Models forget `<|start|>` and `<|channel|>`: the words of a header are not text.
"""

from __future__ import annotations

import re
from functools import partial

from modelyard.core.output_format import OutputFormat, ReasoningBlock, Region, StartReader, SwitchRegion
from modelyard.scanner.grammar import CallGrammar, JsonBody
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BODY_ENDS = (*_ENDS, _START, _CHANNEL)
_HEADER_LIMIT = 256
_REGIONS = {"analysis": "thinking", "final": "text", "commentary": "text", "": "text"}
_RECIPIENT = re.compile(r"(?:\b|(?<=assistant))to=([\w.:/-]+)")
_HEADER_START = re.compile(r"\s*(?:assistant)?\s*(?:to=\S*)?\s*")
_HEADER_WORDS = ("assistant", "to=", "analysis", "final", "commentary")
_TAG = re.compile(rf"[<{SURROGATES}]")
_LAST_WORDS = ("json", "code")  # the type of the body
_FUNCTIONS = "functions."


def _read_header(buffer: TextBuffer, calls: CallBuilder, *, in_channel: bool) -> Incremental[str | None]:
    """From `<|start|>` or `<|channel|>` to the body."""
    markers = tuple(map(buffer.encoded, (*_BODY_ENDS, _CONSTRAIN, _MESSAGE)))
    header, channel = "", ""
    while True:
        part, marker = yield from buffer.read_header(markers, _HEADER_LIMIT - len(header))
        header += part + " "
        if in_channel:
            channel = part.strip().partition(" ")[0]
        in_channel = marker == buffer.encoded(_CHANNEL)
        if marker == buffer.encoded(_MESSAGE):
            break
        if not in_channel and marker != buffer.encoded(_CONSTRAIN):
            return _end_without_body(header)
        buffer.skip(len(marker))
    buffer.skip(len(marker))
    buffer.commit()
    recipient = _RECIPIENT.search(header)
    if recipient and recipient[1] != "assistant":
        calls.start(recipient[1].removeprefix(_FUNCTIONS))
        is_function = recipient[1].startswith(_FUNCTIONS) or calls.tool is not None
        yield from (_read_arguments if is_function else _read_built_in)(buffer, calls)
        return "text"
    if channel not in _REGIONS:
        calls.show_message("text", (yield from _read_body(buffer)))
        return "text"
    return _REGIONS[channel]


def _read_role(buffer: TextBuffer, calls: CallBuilder, *, is_first: bool = False) -> Incremental[str | None]:
    """After a message, or at the start of the output: the header of the next one without its `<|start|>`."""
    yield from buffer.skip_space()
    if not (yield from _is_header(buffer, is_first)):
        raise ParseError("ordinary words")
    yield from buffer.skip_if("assistant")
    yield from buffer.skip_space()
    return (yield from _read_header(buffer, calls, in_channel=True))


def _is_header(buffer: TextBuffer, is_first: bool) -> Incremental[bool]:
    """Whether only words of a header come before the next marker, or before the end if it is not the first one."""
    markers = tuple(map(buffer.encoded, (*_BODY_ENDS, _CONSTRAIN, _MESSAGE)))
    while True:
        ahead = buffer.text[buffer.pos : buffer.pos + _HEADER_LIMIT]
        found = _TAG.search(ahead)
        words, rest = (ahead[: found.start()], ahead[found.start() :]) if found else (ahead, "")
        is_known = all(map(_is_header_word, words.split()))
        if rest.startswith(markers):
            return is_known and bool(words.strip())
        if buffer.ended:
            return is_known and not (is_first or rest)
        *before, last = words.split() or [""]
        may_follow = is_known and any(marker.startswith(rest) for marker in markers)
        if not may_follow and (rest or not _begins_header_word(last) or not all(map(_is_header_word, before))):
            return False
        if len(ahead) >= _HEADER_LIMIT:
            return False
        yield


def _is_header_word(word: str) -> bool:
    word = word.removeprefix("assistant")
    return word in ("", *_HEADER_WORDS, *_LAST_WORDS) or word.startswith("to=")


def _begins_header_word(word: str) -> bool:
    rest = word.removeprefix("assistant")
    return _is_header_word(word) or any(known.startswith(rest) for known in (*_HEADER_WORDS, *_LAST_WORDS))


def _read_built_in(buffer: TextBuffer, calls: CallBuilder) -> Incremental[None]:
    """A message to a tool that the model was trained with: a call if every name is one and the body is JSON, else
    reasoning."""
    yield from buffer.skip_space()
    if calls.is_offered and (yield from buffer.peek()) == "{":
        return (yield from json_arguments(buffer, calls))
    calls.show_message("thinking", (yield from _read_body(buffer)))


def _end_without_body(header: str) -> str:
    """A message without a body. Its header is not shown, unless its words are not those of a header."""
    words = _HEADER_START.sub("", header, count=1).split()
    if words and not any(known.startswith(words[0]) for known in _HEADER_WORDS):
        raise ParseError("expected a header")
    return "text"


def _read_arguments(buffer: TextBuffer, calls: CallBuilder) -> Incremental[None]:
    yield from buffer.skip_space()
    char = yield from buffer.peek()
    if char == "{" and not calls.is_custom:
        yield from json_arguments(buffer, calls)
    elif calls.is_custom or char == "" or (yield from buffer.is_next(*_BODY_ENDS)):
        text = yield from _read_body(buffer)
        if buffer.ended and buffer.is_empty and (buffer.truncated or calls.is_custom or calls.needs_arguments):
            raise ParseError("the output ends inside a call")
        calls.append(text if calls.is_custom else "{}")
        calls.finish()
    else:
        yield from _read_body(buffer)
        raise ParseError("the arguments are not an object")


def _read_body(buffer: TextBuffer) -> Incremental[str]:
    """The body up to the marker that ends it."""
    parts: list[str] = []
    yield from buffer.read_verbatim(tuple(map(buffer.encoded, _BODY_ENDS)), parts.append)
    return "".join(parts)


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    _START: StartReader(partial(_read_header, in_channel=False), _ENDS),
    _CHANNEL: StartReader(partial(_read_header, in_channel=True), _ENDS),
    **{end: SwitchRegion("text", _read_role) for end in _ENDS},
}

FORMATS = (
    OutputFormat(
        name="harmony",
        regions={"text": Region("text", _MARKERS), "thinking": Region("thinking", _MARKERS)},
        start_reader=partial(_read_role, is_first=True),
        hidden_markers=(_CONSTRAIN, _MESSAGE),
        turn_starts=_ENDS,
        has_messages=True,
        stop_tokens=("<|return|>", "<|call|>"),
        messages_of_reasoning=(
            ReasoningBlock(
                "<|channel|>analysis<|message|>", _ENDS, "<|end|><|start|>assistant<|channel|>final<|message|>"
            ),
        ),
        template_hints=((_CHANNEL, _MESSAGE),),
        name_hints=("gpt-oss", "gpt_oss", "harmony"),
        grammar=CallGrammar(
            body=JsonBody("", " <|constrain|>json<|message|>"),
            opening="<|channel|>commentary to=functions.",
            closing="<|call|>",
            trigger="<|channel|>commentary to=functions.",
            reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            before_text="<|channel|>final<|message|>",
            may_repeat=False,
        ),
    ),
)
