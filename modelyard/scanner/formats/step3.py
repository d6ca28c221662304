"""Step 3: `invoke` tags with a namespace, each call between tokens.

    I need the weather.
    </think>
    Let me look.<｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
    <steptml:parameter name="city">Paris</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜><|EOT|>

The prompt opens the reasoning. The tokens may be missing. Step 3.5 writes the calls of Qwen 3 Coder (`step3p5`).
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.formats._invoke import InvokeTags
from modelyard.scanner.grammar import CallSyntax, invoke
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_BLOCK, _BLOCK_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
_ENDS = ("<|EOT|>",)
_TAGS = InvokeTags("<steptml:", "</steptml:", (), after=(_CALL_END, _BLOCK_END))
_INVOKE = "<steptml:invoke name="


def _read_call(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    yield from buffer.skip_if("function")
    if (yield from buffer.skip_if(_SEPARATOR)):
        buffer.commit()
    yield from buffer.skip_space()
    if not (yield from buffer.skip_if(_INVOKE)):
        raise ParseError("expected a call")
    return (yield from _TAGS.readers[_INVOKE].reader(buffer, calls))


FORMATS = (
    OutputFormat(
        name="step3",
        regions=regions(
            {_CALL: StartReader(_read_call, (_CALL_END, _BLOCK_END)), **_TAGS.readers}, closes_alone=True, ends=_ENDS
        ),
        hidden_markers=(
            *(_BLOCK, _SEPARATOR, _CALL_END, _BLOCK_END),
            *(*_TAGS.parameters.ends, _TAGS.parameters.opening, _TAGS.parameters.closing),
        ),
        stop_tokens=_ENDS,
        turn_starts=("<|BOT|>assistant",),
        template_hints=(("steptml:invoke",), ("<｜tool_calls_begin｜>", "steptml:invoke")),
        name_hints=("step3", "step-3"),
        calls=CallSyntax(
            invoke("steptml:"), f"{_BLOCK}\n", f"\n{_BLOCK_END}", f"{_CALL}function{_SEPARATOR}", _CALL_END
        ),
    ),
)
