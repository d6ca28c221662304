"""dots: a block of `invoke` tags, every value as text.

    Let me look.
    <dots_function_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    <parameter name="days">3</parameter>
    </invoke>
    </dots_function_call>

Several calls share a block or have one each. The models also write JSON into a block, open it twice, or forget it.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.formats._invoke import InvokeTags
from modelyard.scanner.grammar import CallSyntax, invoke
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Incremental, TextBuffer
from modelyard.scanner.output import CallBuilder

_BLOCK, _BLOCK_END = "<dots_function_call>", "</dots_function_call>"
_ENDS = ("<|endofresponse|>", "<|endoftext|>")
_READERS = InvokeTags("<", "</", ("dots_function_call",), bare_invoke=True).readers


def _read_block(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    if (yield from buffer.skip_if(_BLOCK)):
        yield from buffer.skip_space()
    read = json_calls if (yield from buffer.peek()) in ("{", "[") else _READERS[_BLOCK].reader
    return (yield from read(buffer, calls))


FORMATS = (
    OutputFormat(
        name="dots",
        regions=regions(
            {**_READERS, _BLOCK: StartReader(_read_block, _READERS[_BLOCK].closing)}, closes_alone=True, ends=_ENDS
        ),
        hidden_markers=(_BLOCK_END,),
        inner_markers=("</invoke>", "<parameter name=", "</parameter>"),
        stop_tokens=_ENDS,
        turn_starts=("<|response|>",),
        template_hints=((_BLOCK,), (_BLOCK, "<invoke name=")),
        name_hints=("dots.llm", "dots-llm", "dots-3", "dots3", "dots1"),
        calls=CallSyntax(invoke(), f"{_BLOCK}\n", f"\n{_BLOCK_END}"),
    ),
)
