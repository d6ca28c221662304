"""Reasoning between tags, then the answer; no tool calls.

    <think>
    First, …
    </think>

    The answer.

Also `<thinking>`, `<thought>`, `<reasoning>`, `[THINK]…[/THINK]` and `◁think▷…◁/think▷`. Many templates write the
opening tag into the prompt: then the output begins inside the reasoning, as the scanner knows from the prompt's tail.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._thinking import EVERY_TAG, regions

FORMAT = OutputFormat(
    name="think",
    regions=regions(EVERY_TAG),
    hidden=tuple(close for _, close in EVERY_TAG),
    stops=("<|im_end|>",),
    turn=("<|im_start|>assistant",),
    template=tuple((tag,) for tag, _ in EVERY_TAG),
    names=("qwq", "r1-distill", "deepseek-r1", "-thinking", "-reasoning", "magistral"),
)
