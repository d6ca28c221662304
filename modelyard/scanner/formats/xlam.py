"""Calls as JSON and nothing else: xLAM.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]

Older models write `{"tool_calls": […]}`; some put the list into a block of code, behind `[TOOL_CALLS]` or between
`<tool_call>` tags, and the reasoning ones after `</think>`. JSON that names no tool on offer is text.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.naked_json import fenced, naked_list, naked_object, open_list

FORMAT = OutputFormat(
    name="xlam",
    regions=regions(
        THINK,
        {
            "<tool_call>": StartReader(json_calls, ("</tool_call>",)),
            "[TOOL_CALLS]": StartReader(open_list, naked=True),
            "[": StartReader(naked_list, naked=True),
            "{": StartReader(naked_object, naked=True),
            "```": StartReader(fenced, naked=True),
        },
    ),
    hidden=("</tool_call>", "<|im_end|>", "<|eot_id|>"),
    stops=("<|im_end|>", "<|eot_id|>", "<|EOT|>"),
    turn=("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "### Response:"),
    template=(('[{"name": "tool_call_name", "arguments":',), ('[{"name": "func_name1", "arguments":',)),
    names=("xlam",),
)
