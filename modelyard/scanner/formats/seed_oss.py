"""Seed-OSS: functions and parameters between its own outer tags, and values directly between their tags.

    <seed:think>I need the weather.</seed:think>
    Let me look.

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    <parameter=days>3</parameter>
    </function>
    </seed:tool_call>

Line breaks inside a value belong to it. If it thinks on a budget, the model counts its tokens between
`<seed:cot_budget_reflect>` tags. That is reasoning, too.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._common import regions
from modelyard.scanner.formats.qwen import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, FunctionTagReader
from modelyard.scanner.grammar import CallGrammar, TaggedBody

_THINK = ("<seed:think>", "</seed:think>")
_CALL, _CALL_END = "<seed:tool_call>", "</seed:tool_call>"
_BUDGET = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")

FORMATS = (
    OutputFormat(
        name="seed_oss",
        regions=regions(FunctionTagReader(_CALL, _CALL_END, on_lines=False).readers, tags=(_THINK,)),
        hidden_markers=(
            *(_CALL_END, FUNCTION_END, PARAMETER, _THINK[1], *_BUDGET),
            *("<seed:bos>", "<seed:eos>", "<seed:pad>"),
        ),
        inner_markers=(PARAMETER_END,),
        stop_tokens=("<seed:eos>",),
        turn_starts=("<seed:bos>assistant",),
        template_hints=((_CALL, FUNCTION),),
        name_hints=("seed-oss", "seed_oss"),
        grammar=CallGrammar(
            body=TaggedBody("\n<function={}>\n", "<parameter={}>", "</parameter>\n"),
            opening=_CALL,
            closing=f"</function>\n{_CALL_END}",
            trigger=_CALL,
            reasoning=_THINK,
        ),
    ),
)
