"""Cohere Command: thinking, actions and responses between tokens.

`cohere_command`: Command R7B and Command A:

    <|START_THINKING|>I need …<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

    <|START_RESPONSE|>It <co>rains</co: 0:[0]>.<|END_RESPONSE|>

The older Command R and R+ write the list into a code block:

    I will look.
    Action: ```json
    [{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]
    ```

Citation tags (`<co>`) are dropped, the words between them stay.

`cohere_command4`: Command A Plus and North write `TEXT` in place of `RESPONSE`, and the prompt opens the thinking. One
reader reads both.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.grammar import JsonBody, listed
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_SOURCES_END = re.compile(r"[^\d:,\[\] ]")
_SOURCES_LIMIT = 256


def _read_code_block(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `Action:`, which is an ordinary word without a code block."""
    yield from buffer.skip_space()
    if not (yield from buffer.skip_if("```json")):
        raise ParseError("expected a code block")
    yield from json_calls(buffer, calls)
    yield from buffer.skip_if("```")
    return None


def _skip_sources(buffer: TextBuffer, _: CallBuilder) -> Incremental[str | None]:
    """After `<co:` or `</co:`: numbers, up to the bracket."""
    yield from buffer.read_until(_SOURCES_END, _SOURCES_LIMIT)
    if not (yield from buffer.skip_if(">")):
        raise ParseError("expected a list of sources")
    return None


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    "<|START_ACTION|>": StartReader(json_calls, ("<|END_ACTION|>",)),
    "Action:": StartReader(_read_code_block, bare=True),
    "<co:": StartReader(_skip_sources),
    "</co:": StartReader(_skip_sources),
    "<|START_RESPONSE|>": SwitchRegion("text"),
    "<|START_TEXT|>": SwitchRegion("text"),
}
_TEXT: dict[str, SwitchRegion | StartReader] = {
    "<|START_THINKING|>": SwitchRegion("thinking"),
    "<|END_RESPONSE|>": SwitchRegion("text"),
    "<|END_TEXT|>": SwitchRegion("text"),
}

_COMMAND = OutputFormat(
    name="cohere_command",
    regions={
        "text": Region("text", {**_TEXT, **_MARKERS}),
        "thinking": Region("thinking", {"<|END_THINKING|>": SwitchRegion("text"), **_MARKERS}),
    },
    hidden_markers=(
        "<|END_ACTION|>",
        "<co>",
        "</co>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
    ),
    stop_tokens=("<|END_OF_TURN_TOKEN|>",),
    turn_starts=("<|CHATBOT_TOKEN|>",),
    results=("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    template_hints=(
        ("<|CHATBOT_TOKEN|>",),
        ("<|CHATBOT_TOKEN|>", "Action:"),
        ("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>"),
    ),
    name_hints=("command-r", "command-a", "c4ai-command"),
    calls=listed("<|START_ACTION|>", "<|END_ACTION|>", JsonBody('{"tool_name": "', '", "parameters": ', "}")),
)

_COMMAND4 = replace(
    _COMMAND,
    name="cohere_command4",
    template_hints=(("<|CHATBOT_TOKEN|>", "<|START_TEXT|>", "<|END_TEXT|>"),),
    name_hints=("command-a-plus", "command-a-05-2026", "north-mini", "cohere2moe"),
)

FORMATS = (_COMMAND, _COMMAND4)
