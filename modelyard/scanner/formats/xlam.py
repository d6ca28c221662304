"""xLAM: calls as JSON and nothing else.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]

Older models write `{"tool_calls": […]}`. Some put the list into a code block, after `[TOOL_CALLS]` or between
`<tool_call>` tags, and the reasoning models after `</think>`. JSON that names no offered tool is text.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import listed
from modelyard.scanner.json_calls import bare_fence, bare_list, bare_object, json_calls, marked_list

FORMATS = (
    OutputFormat(
        name="xlam",
        regions=regions(
            {
                "<tool_call>": StartReader(json_calls, ("</tool_call>",)),
                "[TOOL_CALLS]": StartReader(marked_list, bare=True),
                "[": StartReader(bare_list, bare=True),
                "{": StartReader(bare_object, bare=True),
                "```": StartReader(bare_fence, bare=True),
            }
        ),
        hidden_markers=("</tool_call>", "<|im_end|>", "<|eot_id|>"),
        stop_tokens=("<|im_end|>", "<|eot_id|>", "<|EOT|>"),
        turn_starts=(
            "<|im_start|>assistant",
            "<|start_header_id|>assistant<|end_header_id|>",
            "### Response:",
        ),
        template_hints=(('[{"name": "tool_call_name", "arguments":',), ('[{"name": "func_name1", "arguments":',)),
        name_hints=("xlam",),
        calls=listed(),
    ),
)
