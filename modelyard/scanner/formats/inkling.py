"""Messages that say what they hold, each marker a token: Inkling.

    <|message_model|><|content_thinking|>I need the weather.<|end_message|>
    <|message_model|><|content_text|>Let me look.<|end_message|>
    <|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Paris"}}
    <|end_message|><|content_model_end_sampling|>

(In one line.) They come in any order and number. The prompt has written the first `<|message_model|>`. The name that
may stand between it and the next marker belongs to the header; any other word there is text.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import NAME_LIMIT
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable

_MODEL, _END, _STOP = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
_JSON = "<|content_invoke_tool_json|>"
_SHOWN = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_THINKING = "<|content_thinking|>"
_AFTER_NAME = re.compile(r"[^\w.:/-]")


def _header(tape: Tape, _: Calls) -> Steps[str | None]:
    yield from tape.until(_AFTER_NAME, NAME_LIMIT)
    if not (yield from tape.stands(tuple(map(tape.mark, (*_SHOWN, _THINKING, _JSON, _MODEL))))):
        raise Unreadable("text, no header")
    return "text"


_MARKS: dict[str, SwitchRegion | StartReader] = {
    _MODEL: StartReader(_header),
    _JSON: StartReader(json_calls, (_END, _STOP)),
    _THINKING: SwitchRegion("thinking"),
    **{mark: SwitchRegion("text") for mark in (*_SHOWN, _END, _STOP)},
}

FORMAT = OutputFormat(
    name="inkling",
    regions={"text": Region("text", _MARKS), "thinking": Region("thinking", _MARKS)},
    stops=(_STOP,),
    turn=(_END, _STOP),
    template=((_MODEL,), (_MODEL, _END)),
    names=("inkling",),
)
