"""ERNIE 4.5: calls as JSON objects between tags, answers between others.

    <think>
    I need the weather.
    </think>

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Without a call:

    </think>

    <response>
    It rains.
    </response>

The template of the thinking models opens the reasoning in the prompt.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.formats.qwen import HERMES
from modelyard.scanner.json_calls import json_calls

_MARKERS: dict[str, SwitchRegion | StartReader] = {
    "<tool_call>": StartReader(json_calls, ("</tool_call>",)),
    "<response>": SwitchRegion("text"),
}

FORMATS = (
    OutputFormat(
        name="ernie45",
        results=("<tool_output>", "</tool_output>"),
        regions={
            "text": Region(
                "text",
                {
                    **dict.fromkeys(("<think>", "<thinking>"), SwitchRegion("thinking")),
                    "</response>": SwitchRegion("text"),
                    **_MARKERS,
                },
            ),
            "thinking": Region(
                "thinking", {**dict.fromkeys(("</think>", "</thinking>"), SwitchRegion("text")), **_MARKERS}
            ),
        },
        hidden_markers=("</tool_call>", "<|im_end|>", "<|end_of_sentence|>"),
        stop_tokens=("<|im_end|>", "<|end_of_sentence|>", "</s>"),
        turn_starts=("<|im_start|>assistant", "Assistant:"),
        template_hints=(("<tool_call>", "<response>"), ("<|begin_of_sentence|>", "Assistant:")),
        name_hints=("ernie-4.5", "ernie4.5", "ernie45", "ernie"),
        calls=HERMES.writer,
    ),
)
