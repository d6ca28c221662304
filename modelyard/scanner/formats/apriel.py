"""Apriel 1.5 and 1.6: a JSON list of calls between tags, after reasoning that a sentence opens.

    Here are my reasoning steps:
    I need the weather.
    [BEGIN FINAL RESPONSE]
    Let me look.
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
    [END FINAL RESPONSE]
    <|end|>

The prompt of 1.6 contains the sentence. Some prompts ask for `<thinking>` tags. The prompt confuses `<tool_calls>` and
`<tool_call>`, and so do the models.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.formats._common import at_reply_start
from modelyard.scanner.grammar import listed
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_SENTENCE, _BEGIN, _END = "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
_CALLS_END = ("</tool_calls>", "</tool_call>")
_ENDS = ("<|end|>", "<|endoftext|>")


def _read_calls(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """A bracket may also be the beginning of a marker."""
    yield from buffer.skip_space()
    if (yield from buffer.is_next(_BEGIN, _END)):
        raise ParseError("expected a call")
    return (yield from json_calls(buffer, calls))


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    "<tool_calls>": StartReader(_read_calls, _CALLS_END),
    "<tool_call>": StartReader(_read_calls, _CALLS_END),
    _SENTENCE: StartReader(at_reply_start("thinking"), bare=True),
    **{marker: SwitchRegion("text") for marker in (_BEGIN, _END, *_ENDS)},
    "<thinking>": SwitchRegion("thinking"),
}

FORMATS = (
    OutputFormat(
        name="apriel",
        regions={
            "text": Region("text", _MARKERS),
            "thinking": Region("thinking", {**_MARKERS, "</thinking>": SwitchRegion("text")}),
        },
        hidden_markers=(*_CALLS_END, "</thinking>"),
        stop_tokens=_ENDS,
        turn_starts=("<|assistant|>", "<|begin_assistant|>"),
        template_hints=((_BEGIN,), (_BEGIN, "<tool_calls>")),
        name_hints=("apriel",),
        calls=listed("<tool_calls>", _CALLS_END[0]),
    ),
)
