"""Seed-OSS: its own outer tags, functions and parameters inside, values right between their tags.

    <seed:think>I need the weather.</seed:think>
    Let me look.

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    <parameter=days>3</parameter>
    </function>
    </seed:tool_call>

Line breaks inside a value are part of it. While it thinks on a budget, the model counts its tokens between
`<seed:cot_budget_reflect>` tags: that is reasoning too.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._functions import END, FUNCTION, PARAMETER, PARAMETER_END, Functions
from modelyard.scanner.formats._thinking import regions
from modelyard.scanner.grammar import Shape, TaggedBody

_THINK = (("<seed:think>", "</seed:think>"),)
_CALL, _CALL_END = "<seed:tool_call>", "</seed:tool_call>"
_BUDGET = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")

_SHAPE = Shape(
    body=TaggedBody("\n<function={}>\n", "<parameter={}>", "</parameter>\n"),
    opening=_CALL,
    closing=f"</function>\n{_CALL_END}",
    trigger=_CALL,
    thought=_THINK[0],
)

FORMAT = OutputFormat(
    name="seed_oss",
    regions=regions(_THINK, Functions(_CALL, _CALL_END, lines=False).marks),
    hidden=(_CALL_END, END, "</seed:think>", *_BUDGET, "<seed:bos>", "<seed:eos>", "<seed:pad>"),
    inner=(PARAMETER, PARAMETER_END),
    stops=("<seed:eos>",),
    turn=("<seed:bos>assistant",),
    template=(("<seed:tool_call>", FUNCTION),),
    names=("seed-oss", "seed_oss"),
    grammar=_SHAPE.grammar,
)
