"""Calls as JSON objects between tags, answers between others: ERNIE 4.5.

    <think>
    I need the weather.
    </think>

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

or, without a call,

    </think>

    <response>
    It rains.
    </response>

The template of the thinking models opens the reasoning in the prompt.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.json_calls import json_calls

_RESPONSE, _END_RESPONSE = "<response>", "</response>"
_CALLS: dict[str, SwitchRegion | StartReader] = {
    "<tool_call>": StartReader(json_calls, ("</tool_call>",)),
    _RESPONSE: SwitchRegion("text"),
}

FORMAT = OutputFormat(
    name="ernie45",
    regions={
        "text": Region("text", {"<think>": SwitchRegion("thinking"), _END_RESPONSE: SwitchRegion("text"), **_CALLS}),
        "thinking": Region("thinking", {"</think>": SwitchRegion("text"), **_CALLS}),
    },
    hidden=("</tool_call>", "<|im_end|>", "<|end_of_sentence|>"),
    stops=("<|im_end|>", "<|end_of_sentence|>", "</s>"),
    turn=("<|im_start|>assistant", "Assistant:"),
    template=(("<tool_call>", "<response>"), ("<|begin_of_sentence|>", "Assistant:")),
    names=("ernie-4.5", "ernie4.5", "ernie45", "ernie"),
)
