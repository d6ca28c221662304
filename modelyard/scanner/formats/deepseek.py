"""DeepSeek.

Up to V3.1 calls are between tokens: a name, a separator, JSON.

`deepseek_r1`: R1 and its distillations always reason first, then answer or call with JSON in a code fence:

    <think>
    I need the weather.
    </think>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>now
    ```json
    {}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>

The template or the model opens the reasoning. Only after tool results neither does, and the answer comes at once.
Distillations have no tokens for the markers and misspell the first one in several ways.

`deepseek_v3`: V3 and V3-0324 write the same calls without reasoning.

`deepseek_v31`: V3.1 writes the name before the separator and JSON without a fence:

    I need the weather.</think>Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city":
    "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

All of these read both forms of a call, because fine-tunes mix them. The outer pair, the inner pair and the code fence
may all be missing.

`deepseek_v32`: V3.2 writes `invoke` tags with the token `｜DSML｜` in each and an attribute that tells text from JSON:

    I need the weather.</think>Let me look.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    <｜DSML｜invoke name="now">
    </｜DSML｜invoke>
    </｜DSML｜function_calls><｜end▁of▁sentence｜>

`deepseek_v4`: V4 writes the same with `tool_calls` as the name of the block. One reader reads both, because models
confuse the names, misspell them, forget the block, or leave the token out of every tag.

Since V3.1 the prompt ends with `<think>`, or with `<think></think>` (V4: `</think>`) to disable reasoning.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.formats._common import function_name, regions
from modelyard.scanner.formats._invoke import InvokeTags
from modelyard.scanner.grammar import CallGrammar, CallSyntax, JsonBody, invoke
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_TURN_END, _ROLES = "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")

# --- R1, V3, V3.1 -----------------------------------------------------------------------------------------------------

_BEGIN, _CALL, _SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_OUTPUTS = ("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")
_MISSPELLED = ("<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool\\_calls\\_begin｜>", "<｜tool▁calls｜>")
_HEAD_END = re.compile(rf"[<{{\n{SURROGATES}]")
_NAME_END = re.compile(rf"[\n`{{<{SURROGATES}]")


def _read_block(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After the outer opening: calls one after another. The first may lack its opening."""
    yield from buffer.skip_space()
    if not (yield from buffer.is_next(_CALL)):
        yield from _read_call(buffer, calls)
    while (yield from buffer.skip_if(_CALL)):
        yield from _read_call(buffer, calls)
    yield from buffer.skip_if(_END)
    return None


def _read_call(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    calls.start(function_name((yield from _read_name(buffer))))
    yield from _skip_fence(buffer)
    if (yield from buffer.peek()) == "{":
        yield from json_arguments(buffer, calls)
    elif (yield from _has_no_arguments(buffer, calls)):
        calls.finish("{}")
    else:
        raise ParseError("the arguments are not an object")
    yield from _skip_fence(buffer)
    yield from buffer.skip_if(_CALL_END)
    yield from buffer.skip_space()
    return None


def _read_name(buffer: TextBuffer) -> Incremental[str]:
    """Before the separator, or between it and the arguments if only the kind of the call comes before it."""
    head = yield from buffer.read_until(_HEAD_END)
    if not (yield from buffer.skip_if(_SEPARATOR)):
        raise ParseError("a call without a separator")
    yield from buffer.skip_space()
    if (yield from buffer.peek()) in ("{", "`", "") or (yield from buffer.is_next(_CALL_END, _END, _CALL)):
        return head
    function_name(head)
    return (yield from buffer.read_until(_NAME_END))


def _skip_fence(buffer: TextBuffer) -> Incremental[None]:
    """White space, and the beginning or end of a code block."""
    yield from buffer.skip_space()
    if (yield from buffer.skip_if("```")):
        yield from buffer.skip_if("json")
        yield from buffer.skip_space()


def _has_no_arguments(buffer: TextBuffer, calls: CallBuilder) -> Incremental[bool]:
    """Nothing more belongs to this call. At the end of the output that is certain only for an offered tool."""
    yield from _skip_fence(buffer)  # the code block may be empty
    if (yield from buffer.is_next(_CALL_END, _END, _CALL)):
        return True
    may_end = not buffer.truncated and calls.tool is not None and not calls.needs_arguments
    return (yield from buffer.peek()) == "" and may_end


_READERS = {
    _BEGIN: StartReader(_read_block, (_CALL_END, _END)),
    _CALL: StartReader(_read_call, (_CALL_END, _END)),
}

_V3 = OutputFormat(
    name="deepseek_v3",
    regions=regions(_READERS, closes_alone=True),
    hidden_markers=(_SEPARATOR, _CALL_END, _END, *_OUTPUTS, _TURN_END, *_ROLES),
    stop_tokens=(_TURN_END,),
    turn_starts=("<｜Assistant｜>", *_OUTPUTS[2:]),
    results=("".join(_OUTPUTS[:2]), "".join(_OUTPUTS[2:])),
    template_hints=((_BEGIN,), (_BEGIN, _SEPARATOR, "```json")),
    name_hints=("deepseek-v3", "deepseek_v3", "deepseek-chat"),
    calls=CallSyntax(JsonBody(f"function{_SEPARATOR}", "\n```json\n", "\n```"), _BEGIN, _END, _CALL, _CALL_END),
)

_V31 = replace(
    _V3,
    name="deepseek_v31",
    results=(_OUTPUTS[1], _OUTPUTS[2]),
    template_hints=((_BEGIN, _SEPARATOR),),
    name_hints=("deepseek-v3.1", "deepseek-v31", "deepseek_v31"),
    calls=None,
    grammar=CallGrammar(JsonBody("", _SEPARATOR), _BEGIN, _END, _CALL, _CALL_END, "", trigger=_BEGIN),
)

_R1_REGIONS = regions(_READERS | dict.fromkeys(_MISSPELLED, _READERS[_BEGIN]), closes_alone=True)
_R1_THINKING = {
    **_R1_REGIONS["<think>"].markers,
    "<think>": SwitchRegion("<think>"),
    _OUTPUTS[-1]: SwitchRegion("text"),
}

_R1 = replace(
    _V3,
    name="deepseek_r1",
    regions=_R1_REGIONS | {"<think>": Region("thinking", _R1_THINKING)},
    start_region="<think>",  # even if the prompt does not open it
    calls_in_reasoning=True,  # and even if the model does not reason
    turn_starts=("<｜Assistant｜>",),
    template_hints=((_BEGIN, _SEPARATOR, "```json", "</think>"),),
    name_hints=("deepseek-r1-0", "deepseek-r1-671b", "deepseek-r1-ud"),
)

# --- V3.2, V4 ---------------------------------------------------------------------------------------------------------

_DSML = "｜DSML｜"
_BLOCKS = ("function_calls", "tool_calls")
_TAG_END = re.compile(rf"[>\n<{SURROGATES}]")
_TAG = re.compile(r"\s*\w+(?:\s+\w+=.*)?")
_DSML_TAGS = InvokeTags(f"<{_DSML}", f"</{_DSML}", _BLOCKS)
_BARE_TAGS = InvokeTags("<", "</", _BLOCKS, bare_block=True, bare_invoke=True)


def _skip_tag(buffer: TextBuffer, _: CallBuilder) -> Incremental[str | None]:
    """A tag that opens or closes nothing here, such as a misspelled block, is not shown either."""
    tag = yield from buffer.read_until(_TAG_END)
    if not _TAG.fullmatch(tag) or (yield from buffer.peek()) != ">":
        raise ParseError("not a tag")
    buffer.skip(1)
    return None


_DSML_READERS = {
    **_DSML_TAGS.readers,
    **_BARE_TAGS.readers,
    f"<{_DSML}": StartReader(_skip_tag),
    f"</{_DSML}": StartReader(_skip_tag),
}


def _dsml_calls(block: str) -> CallSyntax:
    body = invoke(_DSML, ' string="{is_text}"')
    return CallSyntax(body, f"<{_DSML}{block}>\n", f"</{_DSML}{block}>", "", "\n", "")


_V32 = OutputFormat(
    name="deepseek_v32",
    results=("<function_results>\n<result>", "</result>\n</function_results>"),
    regions=regions(_DSML_READERS, closes_alone=True),
    hidden_markers=(*_DSML_TAGS.parameters.ends, _DSML, _TURN_END, *_ROLES),
    inner_markers=(_DSML_TAGS.parameters.opening, _DSML_TAGS.parameters.closing),
    stop_tokens=(_TURN_END,),
    turn_starts=("<｜Assistant｜>", "</function_results>"),
    template_hints=((_DSML, "function_calls>"),),
    name_hints=("deepseek-v3.2", "deepseek-v32", "deepseek_v32"),
    calls=_dsml_calls("function_calls"),
)

_V4 = replace(
    _V32,
    name="deepseek_v4",
    results=("<tool_result>", "</tool_result>"),
    template_hints=((_DSML, "tool_calls>"),),
    name_hints=("deepseek-v4", "deepseek_v4"),
    calls=_dsml_calls("tool_calls"),
)

FORMATS = (_R1, _V3, _V31, _V32, _V4)
