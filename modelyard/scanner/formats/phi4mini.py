"""Phi 4 mini, FireFunction 2: a JSON list of calls after one word or between tokens.

`phi4mini`: Phi 4 mini and Phi 4 multimodal:

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>

Sometimes the list comes alone. The word and the list are ordinary text if they contain no call.

`firefunction_v2`: FireFunction 2 writes the word after its text, in the turns of Llama 3:

    Let me look. functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|eot_id|>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import listed
from modelyard.scanner.json_calls import bare_list, json_calls, marked_list
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_CALL_END = ("<|/tool_call|>", "</|tool_call|>")


def _read_functools(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After the word: a list of objects can only be calls."""
    yield from buffer.skip_space()
    if (yield from buffer.peek()) != "[":
        raise ParseError("an ordinary word")
    return (yield from marked_list(buffer, calls))


_PHI4 = OutputFormat(
    name="phi4mini",
    regions=regions(
        {
            "<|tool_call|>": StartReader(json_calls, _CALL_END),
            "functools": StartReader(_read_functools, bare=True),
            "[": StartReader(bare_list, bare=True),
        }
    ),
    hidden_markers=(*_CALL_END, "<|end|>", "<|assistant|>"),
    stop_tokens=("<|end|>", "<|endoftext|>"),
    turn_starts=("<|assistant|>",),
    template_hints=(("<|tool|>", "<|/tool|>"), ("functools[", "<|end|>")),
    name_hints=("phi-4-mini", "phi4-mini", "phi4mini", "phi-4-multimodal"),
    calls=listed("functools"),
)

_FIREFUNCTION = OutputFormat(
    name="firefunction_v2",
    regions=regions(
        {"functools": StartReader(_read_functools, bare=True), "[": StartReader(bare_list, bare=True)},
        ends=("<|eot_id|>",),
    ),
    stop_tokens=("<|eot_id|>", "<|end_of_text|>"),
    turn_starts=("<|start_header_id|>assistant<|end_header_id|>",),
    template_hints=(("functools[", "<|start_header_id|>"),),
    name_hints=("firefunction",),
    calls=_PHI4.calls,
)

FORMATS = (_FIREFUNCTION, _PHI4)
