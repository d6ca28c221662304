"""FunctionGemma: calls in Gemma's notation, with `<escape>` for quotes.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>

After its calls the model writes `<start_function_response>` and waits.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, StartReader
from modelyard.scanner.formats._gemma import Notation

_CALL, _CALL_END, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
_ENDS = ("<end_of_turn>", "<start_function_response>")

FORMAT = OutputFormat(
    name="functiongemma",
    regions={"text": Region("text", {_CALL: StartReader(Notation(_QUOTE, _CALL_END).read, (_CALL_END,))})},
    hidden=(_CALL_END, _QUOTE, *_ENDS, "<end_function_response>", "<start_of_turn>", "<eos>"),
    stops=_ENDS,
    turn=("<start_of_turn>model", "<end_function_response>"),
    template=((_CALL, _QUOTE),),
    names=("functiongemma",),
)
