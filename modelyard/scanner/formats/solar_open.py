"""Solar Open: messages that say what they contain, and calls between tokens.

    <|think|>I need the weather.<|end|>
    <|begin|>assistant<|content|>Let me look.<|end|>
    <|begin|>assistant<|tool_calls|>
    <|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}<|tool_call:end|>
    <|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>

(In one line.) The prompt contains the first `<|begin|>assistant`. The id of a call may be missing.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, ReasoningBlock, Region, StartReader, SwitchRegion
from modelyard.scanner.formats._common import function_name
from modelyard.scanner.grammar import CallSyntax, JsonBody
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_BEGIN, _THINK, _CONTENT, _CALLS = "<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>"
_CALL, _NAME, _ARGUMENTS, _CALL_END = (
    *("<|tool_call:begin|>", "<|tool_call:name|>"),
    *("<|tool_call:args|>", "<|tool_call:end|>"),
)
_ENDS = ("<|end|>", "<|calls|>", "<|flush|>")
_WORD_END = re.compile(rf"[<{{\n{SURROGATES}]")


def _read_role(buffer: TextBuffer, _: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    is_role = yield from buffer.skip_if("assistant")
    yield from buffer.skip_space()
    is_over = (yield from buffer.peek()) == ""
    if not (is_role or is_over) or not (is_over or (yield from buffer.is_next(_THINK, _CONTENT, _CALLS, *_ENDS))):
        raise ParseError("ordinary words")
    return "text"


def _read_call(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    name = yield from buffer.read_until(_WORD_END, may_end=True)
    if (yield from buffer.skip_if(_NAME)):
        buffer.commit()
        name = yield from buffer.read_until(_WORD_END)
    elif (yield from buffer.peek()) == "" and name.isalnum():
        return None  # the output ends inside of the id
    calls.start(function_name(name))
    yield from buffer.skip_if(_ARGUMENTS)
    yield from buffer.skip_space()
    if (yield from buffer.is_next(_CALL_END, _CALL, *_ENDS)):
        calls.finish("{}")
    else:
        yield from json_arguments(buffer, calls)
    yield from buffer.skip_space()
    yield from buffer.skip_if(_CALL_END)
    return None


_MARKERS: dict[str, SwitchRegion | StartReader] = {
    _BEGIN: StartReader(_read_role),
    _CALL: StartReader(_read_call, (_CALL_END, *_ENDS)),
    _THINK: SwitchRegion("thinking"),
    **{marker: SwitchRegion("text") for marker in (*_ENDS, _CONTENT)},
}

FORMATS = (
    OutputFormat(
        name="solar_open",
        results=(
            "<|tool_response:begin|>{id}<|tool_response:name|>{name}<|tool_response:result|>",
            "<|tool_response:end|>",
        ),
        regions={"text": Region("text", _MARKERS), "thinking": Region("thinking", _MARKERS)},
        hidden_markers=(_CALLS, _NAME, _ARGUMENTS, _CALL_END),
        has_messages=True,
        messages_of_reasoning=(ReasoningBlock(_THINK, _ENDS, f"<|end|>{_BEGIN}assistant{_CONTENT}"),),
        stop_tokens=("<|calls|>", "<|flush|>"),
        turn_starts=_ENDS,
        template_hints=((_CALL, _ARGUMENTS), ("<|begin|>assistant", _THINK)),
        name_hints=("solar-open", "solar_open"),
        calls=CallSyntax(
            JsonBody(_NAME, _ARGUMENTS), f"{_BEGIN}assistant{_CALLS}", _ENDS[1], f"{_CALL}{{name}}", _CALL_END, ""
        ),
    ),
)
