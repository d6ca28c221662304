"""MiniCPM 5: calls as XML with attributes, one element per parameter, every value as text.

    <think>
    I need the weather.
    </think>

    <function name="get_weather"><param name="city">Paris</param><param name="days">3</param></function>

A value with `<`, `&` or a line break is between `<![CDATA[` and `]]>`, where it is exact.
"""

from __future__ import annotations

import re
from typing import Any

from modelyard.core.output_format import Dumps, OutputFormat, StartReader
from modelyard.scanner.arguments import (
    ANY_TYPE,
    ArgumentWriter,
    ParameterTags,
    TagValueReader,
    parameter_name,
    read_parameters,
)
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import CallSyntax, TaggedBody
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_FUNCTION, _FUNCTION_END, _PARAM, _PARAM_END = "<function name=", "</function>", "<param name=", "</param>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_TAGS = ParameterTags(_PARAM, ">", _PARAM_END, (_FUNCTION_END,), (_FUNCTION,))
_NAME_END = re.compile(rf"[>\n<{SURROGATES}]")
_BRACKET = re.compile(rf"[\]<{SURROGATES}]")


def _read_function(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After `<function name=`."""
    name, is_empty = yield from _read_name(buffer)
    calls.start(name)
    arguments = ArgumentWriter(calls)
    if is_empty:
        arguments.finish()
        return None
    yield from read_parameters(buffer, _TAGS, arguments, _read_param)
    yield from buffer.skip_if(_FUNCTION_END)
    return None


def _read_name(buffer: TextBuffer) -> Incremental[tuple[str, bool]]:
    """The name, and whether the element ends with its own tag (`/>`)."""
    raw = yield from buffer.read_until(_NAME_END)
    if not (yield from buffer.skip_if(">")):
        raise ParseError("a tag without an end")
    return parameter_name(raw.rstrip("/")), raw.endswith("/")


def _read_param(buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
    name, is_empty = yield from _read_name(buffer)
    if not is_empty and (yield from TagValueReader(buffer, _TAGS, arguments).is_missing()):
        return
    arguments.begin(name, arguments.types_of(name) or ANY_TYPE)
    offset = yield from buffer.skip_space_ahead(0)
    if not is_empty and (opening := (yield from buffer.match((buffer.encoded(_CDATA),), offset))):
        buffer.skip(offset + len(opening))
        yield from _read_cdata(buffer, arguments)
        yield from buffer.skip_space()
        yield from buffer.skip_if(_PARAM_END)
    elif not is_empty:
        yield from TagValueReader(buffer, _TAGS, arguments).read()
    arguments.end()


def _read_cdata(buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
    """Up to `]]>`. The text may contain `]]>`, too: it is the end only if the element ends there. Where it is missing,
    the end of the output ends the text."""
    ends, tags = (buffer.encoded(_PARAM_END), buffer.encoded(_FUNCTION_END)), tuple(map(buffer.encoded, (_PARAM,)))
    while (yield from buffer.peek()):
        found = _BRACKET.search(buffer.text, buffer.pos)
        arguments.write(buffer.take_to(found.start() if found else len(buffer.text)))
        if found and (yield from buffer.match((_CDATA_END,))):
            after = yield from buffer.skip_space_ahead(len(_CDATA_END))
            is_over = buffer.ended and buffer.pos + after >= len(buffer.text)
            if is_over or (yield from buffer.match((*ends, *tags), after)):
                buffer.skip(len(_CDATA_END))
                return
        elif found and (yield from buffer.match(ends)) and (yield from buffer.is_output_end(0, ends, may_repeat=False)):
            return
        if found:
            arguments.write(buffer.skip(1))
    arguments.leave_open(buffer)
    raise ParseError("a value without an end")


class _Body(TaggedBody, frozen=True):
    def _write(self, key: str, value: Any, dumps: Dumps) -> str:
        is_cdata = isinstance(value, str) and any(char in value for char in "<&\n")
        return super()._write(key, f"{_CDATA}{value}{_CDATA_END}" if is_cdata else value, dumps)


FORMATS = (
    OutputFormat(
        name="minicpm5",
        regions=regions({_FUNCTION: StartReader(_read_function, (_FUNCTION_END,))}),
        hidden_markers=(_FUNCTION_END, "<|im_end|>"),
        inner_markers=(_PARAM, _PARAM_END, _CDATA),
        stop_tokens=("<|im_end|>", "</s>"),
        turn_starts=("<|im_start|>assistant",),
        template_hints=((_FUNCTION, _PARAM),),
        name_hints=("minicpm5", "minicpm-5"),
        calls=CallSyntax(_Body(f'{_FUNCTION}"{{}}">', f'{_PARAM}"{{}}">', _PARAM_END), closing=_FUNCTION_END),
    ),
)
