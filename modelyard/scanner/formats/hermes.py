"""Calls as JSON objects between tags: Hermes, Qwen 2.5 and Qwen 3, and every model that is taught by system text.

<think>
I need the weather.
</think>

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.grammar import JsonBody, Shape
from modelyard.scanner.json_calls import json_calls

_TAGS = (*THINK, ("<thinking>", "</thinking>"))

_CALL = Shape(
    body=JsonBody('\n{"name": "', '", "arguments": ', "}\n"),
    opening="<tool_call>",
    closing="</tool_call>",
    trigger="<tool_call>",
)

FORMAT = OutputFormat(
    name="hermes",
    regions=regions(_TAGS, {"<tool_call>": StartReader(json_calls, ("</tool_call>",))}),
    hidden=("</tool_call>", "<|im_end|>", *(close for _, close in _TAGS)),
    stops=("<|im_end|>",),
    turn=("<|im_start|>assistant",),
    template=(("<tool_call>",),),
    names=("hermes", "qwen2.5", "qwen-2.5", "qwen3", "qwen-3"),
    grammar=_CALL.grammar,
)
