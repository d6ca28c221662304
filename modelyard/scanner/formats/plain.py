"""Visible text and nothing else, the format of models that know no protocol.

    Hello, world!
    <text>Hello, world!</text>                      the tags go, the text streams
    <tool_code>{"name": …, "arguments": …}</tool_code>   held until it is complete; text, if it is no call on offer

White space is passed on exactly.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable

_CLOSE = "</tool_code>"


def _tool_code(tape: Tape, calls: Calls) -> Steps[str | None]:
    """Code that is no JSON waits for its end and is shown without its tags."""
    yield from tape.space()
    if (yield from tape.peek()) in ("{", "["):
        return (yield from json_calls(tape, calls))
    close = tape.mark(_CLOSE)
    while (at := tape.text.find(close, tape.at)) < 0:
        tape.take(max(tape.at, len(tape.text) - len(close) + 1))
        if tape.ended:
            at = len(tape.text)
            break
        yield
    tape.take(at)
    raise Unreadable("code, no call")


FORMAT = OutputFormat(
    name="plain",
    regions={"text": Region("text", {"<tool_code>": StartReader(_tool_code, (_CLOSE,))})},
    hidden=("<text>", "</text>", _CLOSE),
    framed=False,
)
