"""A JSON list of calls between tags, inside the answer: Hunyuan A13B.

    <think>
    I need the weather.
    </think>
    <answer>
    I will look.
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
    </answer>

The role that the template writes in Chinese sometimes comes back as the first word of the reply.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable

_ANSWER, _END_ANSWER = "<answer>", "</answer>"
_ROLE = "助手："


def _role(_: Tape, calls: Calls) -> Steps[str | None]:
    """Said by nobody if it is the first word, text otherwise."""
    yield from ()
    if calls.kind != "text" or not calls.is_first:
        raise Unreadable("a word like any other")
    return None


_MARKS: dict[str, SwitchRegion | StartReader] = {
    "<tool_calls>": StartReader(json_calls, ("</tool_calls>",)),
    _ROLE: StartReader(_role, naked=True),
    _ANSWER: SwitchRegion("text"),
}

FORMAT = OutputFormat(
    name="hunyuan_a13b",
    regions={
        "text": Region("text", {"<think>": SwitchRegion("thinking"), _END_ANSWER: SwitchRegion("text"), **_MARKS}),
        "thinking": Region("thinking", {"</think>": SwitchRegion("text"), **_MARKS}),
    },
    hidden=("</tool_calls>", "<|eos|>", "<|startoftext|>", "<|extra_0|>", "<|extra_4|>"),
    stops=("<|eos|>", "<|endoftext|>"),
    turn=("<|extra_0|>",),
    template=(("<tool_calls>", "<|extra_0|>"), ("<|extra_0|>", "<|extra_4|>")),
    names=("hunyuan-a13b", "hunyuan_a13b"),
)
