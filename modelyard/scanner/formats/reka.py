"""Reka Edge, Reka Flash 3: the calls of Hermes in turns that begin with plain words.

    <think>
    I need the weather.
    </think>

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

    <sep>

Turns are `human: …<sep>` and `assistant: …<sep>`. If thinking is enabled, the prompt opens it. Older models write
`<reasoning>`.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import THINK, regions
from modelyard.scanner.formats.qwen import HERMES
from modelyard.scanner.json_calls import json_calls

_ENDS = ("<sep>", "<|endoftext|>")

FORMATS = (
    OutputFormat(
        name="reka",
        regions=regions(
            {"<tool_call>": StartReader(json_calls, ("</tool_call>",))},
            tags=(*THINK, ("<reasoning>", "</reasoning>")),
            closes_alone=True,
            ends=_ENDS,
        ),
        hidden_markers=("</tool_call>",),
        stop_tokens=_ENDS,
        turn_starts=("<sep>assistant:", "<sep> assistant:"),
        template_hints=(("<sep>", "human: ", "<tool_call>"), ("<sep>", "human: ")),
        name_hints=("reka",),
        grammar=HERMES.grammar,
    ),
)
