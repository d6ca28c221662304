"""Calls as JSON objects between tags, in turns with a role: Granite 4.

I will look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call><|end_of_text|>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls

FORMAT = OutputFormat(
    name="granite4",
    regions=regions(THINK, {"<tool_call>": StartReader(json_calls, ("</tool_call>",))}),
    hidden=("</tool_call>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    stops=("<|end_of_text|>",),
    turn=("<|end_of_role|>",),
    template=(("<|start_of_role|>", "<tool_call>"),),
    names=("granite-4", "granite4", "granite-h"),
)
