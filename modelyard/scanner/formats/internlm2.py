"""One JSON object between action tokens: InternLM 2, 2.5 and 3.

    I will look.<|action_start|><|plugin|>
    {"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>

Code for the models' own interpreter (`<|action_start|><|interpreter|>`) is no call of a tool: it is shown as text.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape

_KINDS = ("<|plugin|>", "<|interpreter|>")


def _action(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    if kind := (yield from tape.stands(tuple(map(tape.mark, _KINDS)))):
        tape.skip(len(kind))
    return (yield from json_calls(tape, calls))


FORMAT = OutputFormat(
    name="internlm2",
    regions=regions(THINK, {"<|action_start|>": StartReader(_action, ("<|action_end|>",))}),
    hidden=("<|action_end|>", *_KINDS, "<|im_end|>"),
    stops=("<|im_end|>",),
    turn=("<|im_start|>assistant",),
    template=(("<|action_start|>",),),
    names=("internlm",),
)
