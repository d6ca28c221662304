"""Calls by name alone, in a JSON list between tokens: Apertus.

    <|inner_prefix|>I need the weather.<|inner_suffix|>Let me look.
    <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>

(In one line.) Each object has one key, which names the tool, and the arguments as its value. The usual shape with
`name` and `arguments` is read too.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import regions
from modelyard.scanner.json_calls import JsonCall
from modelyard.scanner.lexer import Steps, Tape, Unreadable

_CALLS, _END = "<|tools_prefix|>", "<|tools_suffix|>"
_INNER = ("<|inner_prefix|>", "<|inner_suffix|>")
_USUAL = frozenset({"name", "tool_name", "function", "arguments", "parameters", "args", "id", "type", "tool_call_id"})


class NamedByKey(JsonCall):
    def _member(self, key: str) -> Steps[None]:
        if key in _USUAL or self._calls.is_open:
            return (yield from super()._member(key))
        self._calls.name(key)
        self._closed = False
        return (yield from self._arguments((yield from self._tape.peek())))


def _calls(tape: Tape, calls: Calls) -> Steps[str | None]:
    """A list of objects; brackets that are missing or too many do no harm."""
    read = 0
    while True:
        yield from tape.space()
        char = yield from tape.peek()
        if char == "{":
            yield from NamedByKey(tape, calls).read()
            read += 1
        elif char and char in (",]}" if read else "["):
            tape.skip(1)
        elif read:
            return None
        else:
            raise Unreadable("no call stands here")


FORMAT = OutputFormat(
    name="apertus",
    regions=regions((_INNER,), {_CALLS: StartReader(_calls, (_END,))}),
    hidden=(_END, _INNER[1], "<|assistant_end|>", "<|assistant_start|>"),
    stops=("<|assistant_end|>",),
    turn=("<|assistant_start|>",),
    template=((_CALLS, _END),),
    names=("apertus",),
)
