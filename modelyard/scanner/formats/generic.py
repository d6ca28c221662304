"""Models without a call syntax of their own.

`plain`, the format of models that know no protocol. White space is passed on exactly:

    Hello, world!
    <text>Hello, world!</text>                           the tags are dropped, the text streams
    <thinking>First, …</thinking>                        reasoning
    <tool_code>{"name": …, "arguments": …}</tool_code>   held until complete; text if it is not a call

`think`, for reasoning between tags and no calls:

    <think>
    First, …
    </think>

    The answer.

Also `<thinking>`, `<thought>`, `<reasoning>`, `[THINK]…[/THINK]` and `◁think▷…◁/think▷`. Many templates write the
opening tag into the prompt. Then the output begins inside the reasoning, as the scanner knows from the tail of the
prompt.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_CODE_END = "</tool_code>"
_TAGS = (
    *THINK,
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)


def _tool_code(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """Code that is not JSON is held until its end and shown without its tags."""
    yield from buffer.skip_space()
    if (yield from buffer.peek()) in ("{", "["):
        return (yield from json_calls(buffer, calls))
    yield from buffer.read_verbatim((buffer.encoded(_CODE_END),))
    raise ParseError("code, but not a call")


_PLAIN = OutputFormat(
    name="plain",
    regions=regions({"<tool_code>": StartReader(_tool_code, (_CODE_END,))}, tags=(("<thinking>", "</thinking>"),)),
    hidden_markers=("<text>", "</text>", _CODE_END),
    trims_newlines=False,
)

_THINK = OutputFormat(
    name="think",
    regions=regions(tags=_TAGS),
    hidden_markers=tuple(close for _, close in _TAGS),
    stop_tokens=("<|im_end|>",),
    turn_starts=("<|im_start|>assistant",),
    template_hints=tuple((tag,) for tag, _ in _TAGS),
    name_hints=("qwq", "r1-distill", "deepseek-r1", "-thinking", "-reasoning", "magistral"),
)

FORMATS = (_PLAIN, _THINK)
