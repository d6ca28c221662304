"""GLM, and the families that use its calls: a bare name, then keys and values between tags.

`glm45`: GLM 4.5 and 4.6 write each tag on its own line:

    <think>I need the weather.</think>
    Let me look.
    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    <arg_key>days</arg_key>
    <arg_value>3</arg_value>
    </tool_call>

`glm47`: GLM 4.7 and 5 write no line breaks, and the prompt opens the reasoning:

    I need the weather.</think>Let me look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>
    <arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>

(In one line.) One reader reads both. Text is written unchanged, all other values as JSON. Under load the models drop
or repeat a tag: a value without its opening, a stray closing tag after the name, a call without an end. All of these
are read.

`ling3`: Ling 3 writes each tag on its own line, in turns between `role` tags that end with `<|role_end|>`. The prompt
opens the reasoning, or opens and closes it.

`poolside_v1`: Poolside's Laguna writes no line breaks, or all of them, in turns that end with `</assistant>`. The
prompt opens the reasoning, or writes only its closing tag.

`spark`: Spark 2.5 writes no line breaks, in turns that begin with `<|Bot|>`. The prompt opens the reasoning, or writes
only its closing tag.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.arguments import (
    ANY_TYPE,
    ArgumentWriter,
    ParameterTags,
    has_value,
    read_parameters,
    read_value,
)
from modelyard.scanner.formats._common import function_name, regions
from modelyard.scanner.grammar import CallGrammar, TaggedBody
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_INNER = (_KEY, _VALUE, _KEY_END, _VALUE_END)
_TAGS = ParameterTags(_KEY, _KEY_END, _VALUE_END, (_CALL_END,), (_CALL,), on_lines=False)
_NAME_END = re.compile(rf"[\n<{{{SURROGATES}]")
_TAG = re.compile(rf"[<{SURROGATES}]")
_SPACE_LIMIT = 64
_NEWLINE = "\\n"  # some models write the line break as two characters


def _read_call(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    if (yield from buffer.peek()) in ("{", "["):
        return (yield from json_calls(buffer, calls))
    name = yield from buffer.read_until(_NAME_END, may_end=True)
    calls.start(function_name(name.removesuffix(_NEWLINE)))
    yield from _skip_all(buffer, _KEY_END, _VALUE_END)
    if (yield from buffer.peek()) == "{":
        yield from json_arguments(buffer, calls)
    else:
        yield from buffer.skip_space()
        if (yield from buffer.peek()) == "" and calls.tool is None:
            raise ParseError("a name alone is a call only of an offered tool")
        yield from read_parameters(buffer, _TAGS, ArgumentWriter(calls), _read_argument)
    yield from _skip_all(buffer, _CALL_END)
    return None


def _read_argument(buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
    yield from _skip_all(buffer, _KEY)
    name = (yield from buffer.read_until(_TAG)).strip()
    if not (yield from buffer.is_next(_KEY_END, _VALUE)):
        raise ParseError("a key without an end")
    yield from _skip_all(buffer, _KEY_END, _NEWLINE)
    yield from buffer.skip_space()
    if not (yield from has_value(buffer, _TAGS)):
        return
    yield from _skip_one(buffer, _VALUE)
    yield from read_value(buffer, _TAGS, arguments, name, arguments.types_of(name) or ANY_TYPE)


def _skip_all(buffer: TextBuffer, *tags: str) -> Incremental[None]:
    """Skip these tags as often as they come."""
    while (yield from _skip_one(buffer, *tags)):
        pass


def _skip_one(buffer: TextBuffer, *tags: str) -> Incremental[bool]:
    """Skip one of these tags and the white space before it."""
    offset = 0
    while offset < _SPACE_LIMIT and (yield from buffer.lookahead(offset + 1))[offset:].isspace():
        offset += 1
    found = yield from buffer.match(tuple(map(buffer.encoded, tags)), offset)
    if found:
        buffer.skip(offset + len(found))
    return found is not None


_READERS = {_CALL: StartReader(_read_call, (_CALL_END,))}

_GLM45 = OutputFormat(
    name="glm45",
    regions=regions(_READERS, closes_alone=True),
    hidden_markers=(_CALL_END, *_INNER, "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    stop_tokens=("<|user|>", "<|observation|>", "<|endoftext|>"),
    turn_starts=("<|assistant|>",),
    template_hints=((_KEY, _VALUE),),
    name_hints=("glm-4.5", "glm-4.6", "glm4.5", "glm4.6"),
    grammar=CallGrammar(
        TaggedBody("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
        "",
        "",
        _CALL,
        _CALL_END,
        trigger=_CALL,
    ),
)

_GLM47 = replace(
    _GLM45,
    name="glm47",
    results=("<tool_response>", "</tool_response>"),
    template_hints=(("{function-name}" + _KEY, _VALUE),),
    name_hints=("glm-4.7", "glm4.7", "glm-5", "glm5"),
    grammar=CallGrammar(
        TaggedBody("{}", "<arg_key>{}</arg_key><arg_value>", "</arg_value>"),
        "",
        "",
        _CALL,
        _CALL_END,
        "",
        trigger=_CALL,
    ),
)


def _relative(
    name: str, turn_start: str, ends: tuple[str, ...], hint: str, name_hints: tuple[str, ...]
) -> OutputFormat:
    """A family with the calls of GLM in other turns."""
    return OutputFormat(
        name=name,
        regions=regions(_READERS, closes_alone=True, ends=ends),
        hidden_markers=(_CALL_END, *_INNER, turn_start),
        stop_tokens=ends,
        turn_starts=(turn_start,),
        template_hints=((hint, _KEY, _VALUE),),
        name_hints=name_hints,
        calls=(_GLM45 if name == "ling3" else _GLM47).writer,
        results=(_GLM45 if name == "ling3" else _GLM47).results,
    )


_LING = _relative(
    "ling3",
    "<role>ASSISTANT</role>",
    ("<|role_end|>", "<|endoftext|>"),
    "<|role_end|>",
    ("ling-3", "ling3", "bailing"),
)
_POOLSIDE = _relative(
    "poolside_v1",
    "<assistant>",
    ("</assistant>", "〈|EOS|〉"),  # the brackets of the second one are not ASCII
    "<assistant>",
    ("laguna", "poolside"),
)

_SPARK = _relative("spark", "<|Bot|>", ("<｜end▁of▁sentence｜>",), "<|Bot|>", ("spark-2.5", "spark2.5"))

FORMATS = (_GLM45, _GLM47, _LING, _POOLSIDE, _SPARK)
