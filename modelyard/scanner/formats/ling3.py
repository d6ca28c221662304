"""Ling 3: the calls of GLM, each tag on a line of its own, in turns between `role` tags.

    I need the weather.</think>Let me look.
    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    <arg_key>days</arg_key>
    <arg_value>3</arg_value>
    </tool_call><|role_end|>

The prompt opens the reasoning, or opens and closes it. Text is written as it is, everything else as JSON.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._glm import INNER, KEY, REGIONS, VALUE
from modelyard.scanner.formats._turns import ended

_ENDS = ("<|role_end|>", "<|endoftext|>")

FORMAT = OutputFormat(
    name="ling3",
    regions=ended(REGIONS, _ENDS),
    hidden=("</tool_call>", "<role>ASSISTANT</role>"),
    inner=INNER,
    stops=_ENDS,
    turn=("<role>ASSISTANT</role>",),
    template=((_ENDS[0], KEY, VALUE),),
    names=("ling-3", "ling3", "bailing"),
)
