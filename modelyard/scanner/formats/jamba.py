"""A JSON list of calls between tags: Jamba.

I will look.<tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Paris"}},
    {"name": "get_time", "arguments": {}}
]</tool_calls>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls

FORMAT = OutputFormat(
    name="jamba",
    regions=regions(THINK, {"<tool_calls>": StartReader(json_calls, ("</tool_calls>",))}),
    hidden=("</tool_calls>", "<|bom|>", "<|eom|>"),
    stops=("<|eom|>", "<|endoftext|>"),
    turn=("<|assistant|>",),
    template=(("<tool_calls>", "<|bom|>"), ("<|bom|>", "<|eom|>")),
    names=("jamba",),
)
