"""Calls as tags, one parameter a tag, every value as text: Qwen 3 Coder, Qwen 3.5 and 3.6.

    I will look.
    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

The models often leave out the outer tag, or the closing ones. Older habits live on: JSON between the outer tags, or
JSON in place of the parameters.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._functions import END, FUNCTION, PARAMETER, PARAMETER_END, Functions
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.grammar import Shape, TaggedBody

_CALL = Shape(
    body=TaggedBody("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n"),
    opening="<tool_call>",
    closing="</function>\n</tool_call>",
    trigger="<tool_call>",
)

FORMAT = OutputFormat(
    name="qwen3_coder",
    regions=regions(THINK, Functions("<tool_call>", "</tool_call>").marks),
    hidden=("</tool_call>", END, "</think>", "<|im_end|>"),
    inner=(PARAMETER, PARAMETER_END),
    stops=("<|im_end|>",),
    turn=("<|im_start|>assistant",),
    template=((FUNCTION, PARAMETER),),
    names=("qwen3-coder", "qwen3.5", "qwen3.6", "qwen3-next-coder"),
    grammar=_CALL.grammar,
)
