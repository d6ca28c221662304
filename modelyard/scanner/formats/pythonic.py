"""Calls as a list of Python calls, with nothing around it: Llama 3.2 and others that are told to write so, ToolACE.

    [get_weather(city="Paris", days=3), now()]

Text may stand before and after. The list is one of calls only if its first name is a tool on offer.
"""

from __future__ import annotations

from functools import partial

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.pythonic_calls import listed_calls

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|im_end|>", "<|python_start|>", "<|python_end|>")

FORMAT = OutputFormat(
    name="pythonic",
    regions=regions(THINK, {"[": StartReader(partial(listed_calls, strict=True), naked=True)}),
    hidden=("</think>", *_ENDS),
    stops=("<|eot_id|>", "<|eom_id|>"),
    turn=("<|start_header_id|>assistant<|end_header_id|>",),
    template=(("[func_name1(params_name1=params_value1",),),
    names=("toolace", "pythonic"),
)
