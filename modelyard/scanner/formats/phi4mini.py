"""A JSON list of calls behind one word or between tokens: Phi 4 mini, FireFunction 2.

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>

Sometimes the list comes alone. The word and the list are ordinary text wherever no call stands in them.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape, Unreadable
from modelyard.scanner.naked_json import naked_list, open_list

_CLOSE = ("<|/tool_call|>", "</|tool_call|>")


def _functools(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After the word: a list of objects can be nothing but calls."""
    yield from tape.space()
    if (yield from tape.peek()) != "[":
        raise Unreadable("a word like any other")
    return (yield from open_list(tape, calls))


FORMAT = OutputFormat(
    name="phi4mini",
    regions=regions(
        THINK,
        {
            "<|tool_call|>": StartReader(json_calls, _CLOSE),
            "functools": StartReader(_functools, naked=True),
            "[": StartReader(naked_list, naked=True),
        },
    ),
    hidden=(*_CLOSE, "<|end|>", "<|assistant|>", "<|eot_id|>"),
    stops=("<|end|>", "<|endoftext|>", "<|eot_id|>"),
    turn=("<|assistant|>", "<|start_header_id|>assistant<|end_header_id|>"),
    template=(("<|tool|>", "<|/tool|>"), ("functools[", "<|end|>"), ("functools[", "<|start_header_id|>")),
    names=("phi-4-mini", "phi4-mini", "phi4mini", "phi-4-multimodal", "firefunction"),
)
