"""DeepSeek V3.1: the name stands before the separator and the JSON has no fence; reasoning where it was switched on.

    I need the weather.</think>Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city":
    "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The prompt ends with `<think>`, or with `<think></think>` where there shall be no reasoning.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._deepseek import BEGIN, CALLS, HIDDEN, ONE, SEPARATOR, STOPS, TURN
from modelyard.scanner.grammar import JsonBody, Shape

_CALL = Shape(
    body=JsonBody("", SEPARATOR),
    begin=BEGIN,
    opening=ONE,
    closing="<｜tool▁call▁end｜>",
    between="",
    end="<｜tool▁calls▁end｜>",
    trigger=BEGIN,
)

FORMAT = OutputFormat(
    name="deepseek_v31",
    regions=closable(CALLS),
    hidden=HIDDEN,
    stops=STOPS,
    turn=TURN,
    template=((BEGIN, SEPARATOR),),
    names=("deepseek-v3.1", "deepseek-v31", "deepseek_v31"),
    grammar=_CALL.grammar,
)
