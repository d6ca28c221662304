"""InternLM 2, 2.5 and 3: one JSON object between action tokens.

    I will look.<|action_start|><|plugin|>
    {"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>

Code for the model's interpreter (`<|action_start|><|interpreter|>`) is not a tool call. It is shown as text.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import CallSyntax, JsonBody
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, TextBuffer
from modelyard.scanner.output import CallBuilder

_KINDS = ("<|plugin|>", "<|interpreter|>")


def _read_action(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    yield from buffer.skip_if(*_KINDS)
    return (yield from json_calls(buffer, calls))


FORMATS = (
    OutputFormat(
        name="internlm2",
        regions=regions({"<|action_start|>": StartReader(_read_action, ("<|action_end|>",))}),
        hidden_markers=("<|action_end|>", *_KINDS, "<|im_end|>"),
        stop_tokens=("<|im_end|>",),
        turn_starts=("<|im_start|>assistant",),
        template_hints=(("<|action_start|>",),),
        name_hints=("internlm",),
        calls=CallSyntax(
            JsonBody('<|plugin|>\n{"name": "', '", "parameters": ', "}"), "", "", "<|action_start|>", "<|action_end|>"
        ),
    ),
)
