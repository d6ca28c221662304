"""Granite.

`granite`: Granite 3 writes a JSON list of calls after one marker:

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]      3.0, as a token; since 3.1 as text
    <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]        some 3.1 models
    [{"name": "get_weather", "arguments": {"city": "Paris"}}]                   often only the list

Reasoning is between tags (3.3) or between two sentences (3.2):

    <think>I need …</think><response>It rains.</response>
    Here is my thought process: I need … Here is my response: It rains.

`granite4`: Granite 4 writes JSON objects between tags:

    I will look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
    <tool_call>
    {"name": "get_time", "arguments": {}}
    </tool_call><|end_of_text|>

`granite_20b_fc`: Granite 20B for function calling, before Granite 3, writes a marker before each object:

    <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}
    <function_call> {"name": "get_time", "arguments": {}}<|endoftext|>

If no tool fits, it calls `no_function`, which is passed on as text.
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.formats._common import at_reply_start, regions
from modelyard.scanner.formats.qwen import HERMES
from modelyard.scanner.grammar import OBJECT, CallSyntax, listed
from modelyard.scanner.json_calls import bare_list, json_calls, marked_list
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder


def _end_thoughts(_: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from ()
    if calls.kind != "thinking":
        raise ParseError("ordinary words")
    return "text"


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    "<|tool_call|>": StartReader(marked_list),
    "<tool_call>": StartReader(marked_list, ("</tool_call>",)),
    "[": StartReader(bare_list, bare=True),
    "Here is my thought process:": StartReader(at_reply_start("thinking"), bare=True),
    "Here's my thought process:": StartReader(at_reply_start("thinking"), bare=True),
    "Here is my response:": StartReader(_end_thoughts, bare=True),
    "Here's my response:": StartReader(_end_thoughts, bare=True),
    "<response>": SwitchRegion("text"),
}

_GRANITE3 = OutputFormat(
    name="granite",
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
    hidden_markers=("</tool_call>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    stop_tokens=("<|end_of_text|>",),
    turn_starts=("<|end_of_role|>",),
    template_hints=(("<|start_of_role|>",), ("<|start_of_role|>", "<|tool_call|>")),
    name_hints=("granite",),
    calls=listed("<|tool_call|>"),
)

_GRANITE4 = replace(
    _GRANITE3,
    name="granite4",
    regions=regions({"<tool_call>": StartReader(json_calls, ("</tool_call>",))}),
    template_hints=(("<|start_of_role|>", "<tool_call>"),),
    name_hints=("granite-4", "granite4", "granite-h"),
    calls=HERMES.writer,
)

_GRANITE_20B = OutputFormat(
    name="granite_20b_fc",
    results=("<function_response> ", ""),
    regions=regions({"<function_call>": StartReader(json_calls, ("</function_call>",))}),
    hidden_markers=("</function_call>", "<|endoftext|>", "<function_response>"),
    stop_tokens=("<|endoftext|>",),
    turn_starts=("ASSISTANT:",),
    template_hints=(("<function_call>",), ("<function_call>", "<|function_call_library|>")),
    name_hints=("granite-20b-functioncalling", "granite-20b-fc"),
    calls=CallSyntax(OBJECT, opening="<function_call> "),
)

FORMATS = (_GRANITE3, _GRANITE4, _GRANITE_20B)
