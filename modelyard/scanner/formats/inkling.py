"""Inkling: messages that say what they contain, with a token for each marker.

    <|message_model|><|content_thinking|>I need the weather.<|end_message|>
    <|message_model|><|content_text|>Let me look.<|end_message|>
    <|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Paris"}}
    <|end_message|><|content_model_end_sampling|>

(In one line.) Messages come in any order and number. The prompt contains the first `<|message_model|>`. The name that
may follow it belongs to the header. Any other word there is text.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, ReasoningBlock, Region, StartReader, SwitchRegion
from modelyard.scanner.grammar import CallSyntax, JsonBody
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_MODEL, _END, _STOP = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
_JSON = "<|content_invoke_tool_json|>"
_TEXT = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_THINKING = "<|content_thinking|>"
_NAME_END = re.compile(r"[^\w.:/-]")


def _read_header(buffer: TextBuffer, _: CallBuilder) -> Incremental[str | None]:
    yield from buffer.read_until(_NAME_END)
    if not (yield from buffer.is_next(*_TEXT, _THINKING, _JSON, _MODEL)):
        raise ParseError("text, but not a header")
    return "text"


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    _MODEL: StartReader(_read_header),
    _JSON: StartReader(json_calls, (_END, _STOP)),
    _THINKING: SwitchRegion("thinking"),
    **{marker: SwitchRegion("text") for marker in (*_TEXT, _END, _STOP)},
}

FORMATS = (
    OutputFormat(
        name="inkling",
        regions={"text": Region("text", _MARKERS), "thinking": Region("thinking", _MARKERS)},
        has_messages=True,
        messages_of_reasoning=(ReasoningBlock(_THINKING, (_END, *_TEXT, _STOP), f"{_END}{_MODEL}{_TEXT[0]}"),),
        stop_tokens=(_STOP,),
        turn_starts=(_END, _STOP),
        template_hints=((_MODEL,), (_MODEL, _END)),
        name_hints=("inkling",),
        calls=CallSyntax(
            JsonBody('{"name": "', '", "args": ', "}"), opening=f"{_MODEL}{{name}}{_JSON}", closing=_END, between=""
        ),
    ),
)
