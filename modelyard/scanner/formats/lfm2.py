"""LFM2 and LFM2.5: calls as Python, in a list between tokens.

    <think>I need the weather.</think>I will look.<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>

If the system prompt asks for JSON, they write `<|tool_call_start|>[{"name": …, "arguments": {…}}]<|tool_call_end|>`.
The models often repeat the list after its end, up to a second end token. That echo is dropped.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import PythonBody, listed
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder
from modelyard.scanner.pythonic_calls import pythonic_list

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME_END = re.compile(r"[^\w.\s-]")
_SPACE_LIMIT = 16


def _read_calls(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    if (yield from buffer.skip_if("[")):
        yield from buffer.skip_space()
    read = json_calls if (yield from buffer.peek()) == "{" else pythonic_list
    yield from read(buffer, calls)
    if (yield from buffer.skip_if(_END)) and (yield from _next_char(buffer)) == "[":
        yield from _skip_echo(buffer)
    return None


def _next_char(buffer: TextBuffer) -> Incremental[str]:
    """The character after a little white space, which is not taken: it may belong to the text."""
    for count in range(1, _SPACE_LIMIT):
        ahead = yield from buffer.lookahead(count)
        if not ahead[count - 1 :].isspace():
            return ahead[count - 1 :]
    return ""


def _skip_echo(buffer: TextBuffer) -> Incremental[None]:
    buffer.commit()
    yield from buffer.skip_space()
    buffer.skip(1)
    yield from buffer.read_until(_NAME_END)
    if (yield from buffer.peek()) not in ("(", "{"):
        raise ParseError("text, but not an echo")
    ends = tuple(map(buffer.encoded, (_END, _START, "<|im_end|>")))
    end = yield from buffer.read_verbatim(ends)
    if end != ends[0]:
        raise ParseError("text, but not an echo")
    buffer.skip(len(end))


FORMATS = (
    OutputFormat(
        name="lfm2",
        regions=regions({_START: StartReader(_read_calls, (_END,))}),
        hidden_markers=(_END, "<|im_end|>"),
        stop_tokens=("<|im_end|>",),
        turn_starts=("<|im_start|>assistant",),
        results=("<|tool_response_start|>", "<|tool_response_end|>"),
        template_hints=(("<|tool_list_start|>",), ("<|tool_call_start|>",), ("List of tools: [",)),
        name_hints=("lfm2",),
        calls=listed(_START, _END, PythonBody()),
    ),
)
