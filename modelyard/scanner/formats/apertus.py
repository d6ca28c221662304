"""Apertus: calls in a JSON list between tokens, each with the name as its only key.

    <|inner_prefix|>I need the weather.<|inner_suffix|>Let me look.
    <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>

(In one line.) The usual shape with `name` and `arguments` is read, too.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import JsonBody, listed
from modelyard.scanner.json_calls import JsonCallReader
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_CALLS, _CALLS_END = "<|tools_prefix|>", "<|tools_suffix|>"
_REASONING = ("<|inner_prefix|>", "<|inner_suffix|>")
_USUAL_KEYS = frozenset(
    {"name", "tool_name", "function", "arguments", "parameters", "args", "id", "type", "tool_call_id"}
)
_TEXT_KEYS = frozenset({"name", "tool_name", "id", "type", "tool_call_id"})  # an object is a tool's arguments


class _NamedByKeyReader(JsonCallReader):
    def _member(self, key: str) -> Incremental[None]:
        char = yield from self._buffer.peek()
        is_usual = key in _USUAL_KEYS and not (key in _TEXT_KEYS and char == "{")
        if is_usual or self._calls.is_open:
            return (yield from super()._member(key))
        self._calls.start(key)
        self._is_finished = False
        return (yield from self._arguments(char))


def _read_calls(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """A list of objects. Missing and surplus brackets are ignored."""
    has_calls = False
    while True:
        yield from buffer.skip_space()
        char = yield from buffer.peek()
        if char == "{":
            yield from _NamedByKeyReader(buffer, calls).read()
            has_calls = True
        elif char and char in (",]}" if has_calls else "["):
            buffer.skip(1)
        elif has_calls:
            return None
        else:
            raise ParseError("expected a call")


FORMATS = (
    OutputFormat(
        name="apertus",
        results=("[", "]"),
        regions=regions({_CALLS: StartReader(_read_calls, (_CALLS_END,))}, tags=(_REASONING,)),
        hidden_markers=(_CALLS_END, _REASONING[1], "<|assistant_end|>", "<|assistant_start|>"),
        calls_in_reasoning=True,
        stop_tokens=("<|assistant_end|>",),
        turn_starts=("<|assistant_start|>",),
        template_hints=((_CALLS, _CALLS_END),),
        name_hints=("apertus",),
        calls=listed(_CALLS, _CALLS_END, JsonBody('{"', '": ', "}")),
    ),
)
