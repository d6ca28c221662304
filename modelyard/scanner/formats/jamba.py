"""Jamba: a JSON list of calls between tags.

I will look.<tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Paris"}},
    {"name": "get_time", "arguments": {}}
]</tool_calls>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import OBJECT, CallSyntax
from modelyard.scanner.json_calls import json_calls

FORMATS = (
    OutputFormat(
        name="jamba",
        regions=regions({"<tool_calls>": StartReader(json_calls, ("</tool_calls>",))}),
        hidden_markers=("</tool_calls>", "<|bom|>", "<|eom|>"),
        stop_tokens=("<|eom|>", "<|endoftext|>"),
        turn_starts=("<|assistant|>",),
        template_hints=(("<tool_calls>", "<|bom|>"), ("<|bom|>", "<|eom|>")),
        name_hints=("jamba",),
        calls=CallSyntax(OBJECT, "<tool_calls>[\n    ", "\n]</tool_calls>", between=",\n    "),
    ),
)
