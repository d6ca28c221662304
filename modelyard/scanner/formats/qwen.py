"""Hermes, Qwen, and the families that use their calls.

`hermes`: calls as JSON objects between tags. Hermes, Qwen 2.5, Qwen 3, and every model that is taught by system text:

    <think>
    I need the weather.
    </think>

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
    <tool_call>
    {"name": "get_time", "arguments": {}}
    </tool_call>

`qwen3_coder`: calls as tags, one per parameter, every value as text. Qwen 3 Coder, Qwen 3.5 and 3.6:

    I will look.
    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

The models often leave out the outer tag or the closing ones. They also write JSON between the outer tags, or JSON in
place of the parameters. Other wrong tags are read if only one meaning is possible: `<function name>` of an offered
tool, a name that ends with a line break instead of `>`, `<parameter=parameter=name>`, and `<function=now/>`. Objects
and lists are written as JSON, everything else as text.

`step3p5`: Step 3.5 writes the calls of Qwen 3 Coder after reasoning that the prompt opens.
"""

from __future__ import annotations

import re
from functools import cached_property

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.arguments import (
    CONTAINER_OR_TEXT,
    ArgumentWriter,
    ParameterTags,
    parameter_name,
    read_parameters,
    read_value,
)
from modelyard.scanner.formats._common import THINK, regions
from modelyard.scanner.grammar import CallGrammar, JsonBody, TaggedBody
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

HERMES = OutputFormat(
    name="hermes",
    regions=regions({"<tool_call>": StartReader(json_calls, ("</tool_call>",))}),
    hidden_markers=("</tool_call>", "<|im_end|>", *(close for _, close in THINK)),
    stop_tokens=("<|im_end|>",),
    turn_starts=("<|im_start|>assistant",),
    template_hints=(("<tool_call>",),),
    name_hints=("hermes", "qwen2.5", "qwen-2.5", "qwen3", "qwen-3"),
    grammar=CallGrammar(
        body=JsonBody('\n{"name": "', '", "arguments": ', "}\n"),
        opening="<tool_call>",
        closing="</tool_call>",
        trigger="<tool_call>",
    ),
)

FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NAME_END = re.compile(rf"[>\n<{SURROGATES}]")


class FunctionTagReader:
    """Reads `<function=name>` with one `<parameter=name>` per value, between `outer` and `outer_end`.

    `untyped` are the types of a value for which the schema names none.
    """

    def __init__(self, outer: str, outer_end: str, *, on_lines: bool = True, untyped: tuple[str, ...] = ()) -> None:
        self._outer, self._outer_end, self._untyped = outer, outer_end, untyped
        ends, after = (FUNCTION_END, outer_end), (outer, FUNCTION)
        self._tags = ParameterTags(PARAMETER, ">", PARAMETER_END, ends, after, on_lines)

    @cached_property
    def readers(self) -> dict[str, StartReader]:
        return {
            self._outer: StartReader(self._read_outer, (self._outer_end,)),
            FUNCTION: StartReader(self._read_function, (FUNCTION_END, self._outer_end)),
        }

    def _read_outer(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        """After the outer tag: functions one after another, or JSON."""
        yield from buffer.skip_space()
        if (yield from buffer.peek()) in ("{", "["):
            return (yield from json_calls(buffer, calls))
        count = 0
        while (is_function := (yield from buffer.skip_if(FUNCTION))) or (yield from buffer.skip_if(FUNCTION[:-1])):
            name, is_empty = yield from _read_name(buffer)
            calls.start(name)
            if not is_function and not calls.is_offered:
                raise ParseError("expected a function")
            yield from self._read_body(buffer, calls, is_empty)
            yield from buffer.skip_space()
            count += 1
        if not count:
            raise ParseError("expected a function")
        return None

    def _read_function(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        """After `<function=`."""
        name, is_empty = yield from _read_name(buffer)
        calls.start(name)
        yield from self._read_body(buffer, calls, is_empty)
        return None

    def _read_body(self, buffer: TextBuffer, calls: CallBuilder, is_empty: bool) -> Incremental[None]:
        arguments = ArgumentWriter(calls)
        if is_empty:
            return arguments.finish()
        yield from buffer.skip_space()
        if (yield from buffer.peek()) == "{":
            yield from json_arguments(buffer, calls)
        else:
            yield from read_parameters(buffer, self._tags, arguments, self._read_parameter)
        yield from buffer.skip_space()
        yield from buffer.skip_if(FUNCTION_END)

    def _read_parameter(self, buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
        name, is_empty = yield from _read_name(buffer)
        name = name.removeprefix(PARAMETER[1:])
        types = arguments.types_of(name) or self._untyped
        if is_empty:
            arguments.begin(name, types)
            arguments.end()
        else:
            yield from read_value(buffer, self._tags, arguments, name, types)


def _read_name(buffer: TextBuffer) -> Incremental[tuple[str, bool]]:
    """The name, and whether the element ends with its own tag (`/>`)."""
    raw = (yield from buffer.read_until(_NAME_END)).rstrip()
    name = parameter_name(raw.removesuffix("/"))
    end = yield from buffer.peek()
    if end == ">":
        buffer.skip(1)
    elif end != "\n" or not name or " " in name:
        raise ParseError("a tag without an end")
    return name, raw.endswith("/") and end == ">"


QWEN3_CODER = OutputFormat(
    name="qwen3_coder",
    regions=regions(FunctionTagReader("<tool_call>", "</tool_call>", untyped=CONTAINER_OR_TEXT).readers),
    hidden_markers=("</tool_call>", FUNCTION_END, PARAMETER, "</think>", "<|im_end|>"),
    inner_markers=(PARAMETER_END,),
    stop_tokens=("<|im_end|>",),
    turn_starts=("<|im_start|>assistant",),
    template_hints=((FUNCTION, PARAMETER),),
    name_hints=("qwen3-coder", "qwen3.5", "qwen3.6", "qwen3-next-coder"),
    grammar=CallGrammar(
        body=TaggedBody("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n"),
        opening="<tool_call>",
        closing="</function>\n</tool_call>",
        trigger="<tool_call>",
    ),
)

_STEP = replace(
    QWEN3_CODER,
    name="step3p5",
    results=("<tool_response>", "</tool_response>"),
    template_hints=((FUNCTION, PARAMETER, "<|im_start|>tool_response"),),
    name_hints=("step-3.5", "step3.5", "step3p5", "step-3p5"),
)

FORMATS = (HERMES, QWEN3_CODER, _STEP)
