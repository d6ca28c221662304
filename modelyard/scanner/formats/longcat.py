"""LongCat Flash: calls between the family's own tags, as JSON or as keys and values.

    <longcat_think>I need the weather.</longcat_think>
    <longcat_tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </longcat_tool_call>

Later models write text unchanged and all other values as JSON:

    <longcat_tool_call>get_weather
    <longcat_arg_key>city</longcat_arg_key>
    <longcat_arg_value>Paris</longcat_arg_value>
    </longcat_tool_call>
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.arguments import (
    ANY_TYPE,
    ArgumentWriter,
    ParameterTags,
    has_value,
    read_parameters,
    read_value,
)
from modelyard.scanner.formats._common import THINK, function_name, regions
from modelyard.scanner.grammar import OBJECT, CallSyntax
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_CALL, _CALL_END = "<longcat_tool_call>", "</longcat_tool_call>"
_KEY, _KEY_END = "<longcat_arg_key>", "</longcat_arg_key>"
_VALUE, _VALUE_END = "<longcat_arg_value>", "</longcat_arg_value>"
_TAGS = ParameterTags(_KEY, _KEY_END, _VALUE_END, (_CALL_END,), (_CALL,), on_lines=False)
_NAME_END = re.compile(rf"[<\n{SURROGATES}]")


def _read_call(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    if (yield from buffer.peek()) in ("{", "["):
        return (yield from json_calls(buffer, calls))
    calls.start(function_name((yield from buffer.read_until(_NAME_END))))
    yield from read_parameters(buffer, _TAGS, ArgumentWriter(calls), _read_argument)
    return None


def _read_argument(buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
    name = (yield from buffer.read_until(_NAME_END)).strip()
    yield from _expect(buffer, _KEY_END)
    yield from buffer.skip_space()
    if not (yield from has_value(buffer, _TAGS)):
        return
    yield from _expect(buffer, _VALUE)
    yield from read_value(buffer, _TAGS, arguments, name, arguments.types_of(name) or ANY_TYPE)


def _expect(buffer: TextBuffer, tag: str) -> Incremental[None]:
    if not (yield from buffer.skip_if(tag)):
        raise ParseError(f"{tag} is missing")


FORMATS = (
    OutputFormat(
        name="longcat",
        regions=regions(
            {_CALL: StartReader(_read_call, (_CALL_END,))}, tags=(("<longcat_think>", "</longcat_think>"), *THINK)
        ),
        hidden_markers=(_CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END, "</longcat_s>"),
        stop_tokens=("</longcat_s>",),
        turn_starts=("ASSISTANT:", "<longcat_assistant>"),
        template_hints=((_CALL,),),
        name_hints=("longcat",),
        calls=CallSyntax(OBJECT, opening=f"{_CALL}\n", closing=f"\n{_CALL_END}"),
    ),
)
