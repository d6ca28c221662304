"""A JSON list of calls behind one marker: Granite 3.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]      3.0, as a token; 3.1 and later as text
    <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]        some 3.1 models
    [{"name": "get_weather", "arguments": {"city": "Paris"}}]                   often nothing but the list

Reasoning stands between tags (3.3), or between two sentences (3.2):

    <think>I need …</think><response>It rains.</response>
    Here is my thought process: I need … Here is my response: It rains.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable
from modelyard.scanner.naked_json import naked_list, open_list

_THINK, _END_THINK, _RESPONSE, _END_RESPONSE = "<think>", "</think>", "<response>", "</response>"


def _thoughts(_: Tape, calls: Calls) -> Steps[str | None]:
    """The sentence opens the reasoning only as the first words of a reply."""
    yield from ()
    if calls.kind != "text" or not calls.is_first:
        raise Unreadable("a sentence like any other")
    return "thinking"


def _response(_: Tape, calls: Calls) -> Steps[str | None]:
    yield from ()
    if calls.kind != "thinking":
        raise Unreadable("a sentence like any other")
    return "text"


_CALLS: dict[str, SwitchRegion | StartReader] = {
    "<|tool_call|>": StartReader(open_list),
    "<tool_call>": StartReader(open_list, ("</tool_call>",)),
    "[": StartReader(naked_list, naked=True),
    "Here is my thought process:": StartReader(_thoughts, naked=True),
    "Here's my thought process:": StartReader(_thoughts, naked=True),
    "Here is my response:": StartReader(_response, naked=True),
    "Here's my response:": StartReader(_response, naked=True),
    _RESPONSE: SwitchRegion("text"),
}

FORMAT = OutputFormat(
    name="granite",
    regions={
        "text": Region("text", {_THINK: SwitchRegion("thinking"), _END_RESPONSE: SwitchRegion("text"), **_CALLS}),
        "thinking": Region("thinking", {_END_THINK: SwitchRegion("text"), **_CALLS}),
    },
    hidden=("</tool_call>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    stops=("<|end_of_text|>",),
    turn=("<|end_of_role|>",),
    template=(("<|start_of_role|>",), ("<|start_of_role|>", "<|tool_call|>")),
    names=("granite",),
)
