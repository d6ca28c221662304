"""A JSON list of calls between tags, after reasoning that a sentence opens: Apriel 1.5 and 1.6.

    Here are my reasoning steps:
    I need the weather.
    [BEGIN FINAL RESPONSE]
    Let me look.
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
    [END FINAL RESPONSE]
    <|end|>

The prompt of 1.6 has written the sentence. Some prompts ask for `<thinking>` tags. The words of the prompt confuse
`<tool_calls>` and `<tool_call>`, so the models do.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable

_SENTENCE, _BEGIN, _END = "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
_THINKING, _END_THINKING = "<thinking>", "</thinking>"
_CLOSE = ("</tool_calls>", "</tool_call>")
_ENDS = ("<|end|>", "<|endoftext|>")


def _steps(_: Tape, calls: Calls) -> Steps[str | None]:
    """The sentence opens the reasoning only as the first words of a reply."""
    yield from ()
    if calls.kind != "text" or not calls.is_first:
        raise Unreadable("a sentence like any other")
    return "thinking"


def _calls(tape: Tape, calls: Calls) -> Steps[str | None]:
    """A bracket may also be the beginning of a marker."""
    yield from tape.space()
    if (yield from tape.stands(tuple(map(tape.mark, (_BEGIN, _END))))):
        raise Unreadable("no call stands here")
    return (yield from json_calls(tape, calls))


_MARKS: dict[str, SwitchRegion | StartReader] = {
    "<tool_calls>": StartReader(_calls, _CLOSE),
    "<tool_call>": StartReader(_calls, _CLOSE),
    _SENTENCE: StartReader(_steps, naked=True),
    **{mark: SwitchRegion("text") for mark in (_BEGIN, _END, *_ENDS)},
    _THINKING: SwitchRegion("thinking"),
}

FORMAT = OutputFormat(
    name="apriel",
    regions={
        "text": Region("text", _MARKS),
        "thinking": Region("thinking", {**_MARKS, _END_THINKING: SwitchRegion("text")}),
    },
    hidden=(*_CLOSE, _END_THINKING),
    stops=_ENDS,
    turn=("<|assistant|>", "<|begin_assistant|>"),
    template=(("[BEGIN FINAL RESPONSE]",), ("[BEGIN FINAL RESPONSE]", "<tool_calls>")),
    names=("apriel",),
)
