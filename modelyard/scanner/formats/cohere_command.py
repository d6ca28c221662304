"""Thinking, action and response between tokens: Command R7B and Command A. Also the older Command R and R+.

    <|START_THINKING|>I need …<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

    <|START_RESPONSE|>It <co>rains</co: 0:[0]>.<|END_RESPONSE|>

The older ones write the list into a block of code:

    I will look.
    Action: ```json
    [{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]
    ```

What grounds a sentence in its sources (`<co>`) is protocol: the words between stay, the tags go.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable

_SOURCES_END = re.compile(r"[^\d:,\[\] ]")
_SOURCES_LIMIT = 256
_FENCES = ("```json", "```")


def _in_fence(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `Action:`. What has no block of code behind it is a word like any other."""
    yield from tape.space()
    fence = yield from _fence(tape, _FENCES[0])
    if not fence:
        raise Unreadable("no block of code")
    yield from json_calls(tape, calls)
    yield from _fence(tape, _FENCES[1])
    return None


def _fence(tape: Tape, fence: str) -> Steps[bool]:
    here = yield from tape.stands((fence,))
    tape.skip(len(here or ""))
    return here is not None


def _sources(tape: Tape, _: Calls) -> Steps[str | None]:
    """After `<co:` or `</co:`: numbers, up to the bracket."""
    yield from tape.until(_SOURCES_END, _SOURCES_LIMIT)
    if (yield from tape.peek()) != ">":
        raise Unreadable("no list of sources")
    tape.skip(1)
    return None


_MARKS: dict[str, SwitchRegion | StartReader] = {
    "<|START_ACTION|>": StartReader(json_calls, ("<|END_ACTION|>",)),
    "Action:": StartReader(_in_fence, naked=True),
    "<co:": StartReader(_sources),
    "</co:": StartReader(_sources),
    "<|START_RESPONSE|>": SwitchRegion("text"),
    "<|START_TEXT|>": SwitchRegion("text"),
}

FORMAT = OutputFormat(
    name="cohere_command",
    regions={
        "text": Region(
            "text",
            {
                "<|START_THINKING|>": SwitchRegion("thinking"),
                "<|END_RESPONSE|>": SwitchRegion("text"),
                "<|END_TEXT|>": SwitchRegion("text"),
                **_MARKS,
            },
        ),
        "thinking": Region("thinking", {"<|END_THINKING|>": SwitchRegion("text"), **_MARKS}),
    },
    hidden=("<|END_ACTION|>", "<co>", "</co>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    stops=("<|END_OF_TURN_TOKEN|>",),
    turn=("<|CHATBOT_TOKEN|>",),
    template=(("<|CHATBOT_TOKEN|>",), ("<|CHATBOT_TOKEN|>", "Action:"), ("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>")),
    names=("command-r", "command-a", "c4ai-command"),
)
