"""A block of `invoke` tags, every value as text: dots.

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
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._invoke import tagged
from modelyard.scanner.formats._turns import ended
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape

_BLOCK, _END = "<dots_function_call>", "</dots_function_call>"
_ENDS = ("<|endofresponse|>", "<|endoftext|>")
_INVOKES = tagged("<", "</", ("dots_function_call",), plain_block=False, plain_invoke=True).marks()


def _block(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    if here := (yield from tape.stands((tape.mark(_BLOCK),))):
        tape.skip(len(here))
        yield from tape.space()
    read = json_calls if (yield from tape.peek()) in ("{", "[") else _INVOKES[_BLOCK].reader
    return (yield from read(tape, calls))


FORMAT = OutputFormat(
    name="dots",
    regions=ended(closable({**_INVOKES, _BLOCK: StartReader(_block, _INVOKES[_BLOCK].close)}), _ENDS),
    hidden=(_END,),
    inner=("</invoke>", "<parameter name=", "</parameter>"),
    stops=_ENDS,
    turn=("<|response|>",),
    template=((_BLOCK,), (_BLOCK, "<invoke name=")),
    names=("dots.llm", "dots-llm", "dots-3", "dots3", "dots1"),
)
