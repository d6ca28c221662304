"""Poolside's Laguna: the calls of GLM, in turns between `assistant` tags.

    <think>I need the weather.</think>Let me look.<tool_call>get_weather<arg_key>city</arg_key>
    <arg_value>Paris</arg_value></tool_call></assistant>

(One line; some of the models put each tag on a line of its own.) The prompt opens the reasoning, or writes its closing
tag alone where there is none. A value's white space is exact.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._glm import INNER, KEY, REGIONS, VALUE
from modelyard.scanner.formats._turns import ended

_ENDS = ("</assistant>", "〈|EOS|〉")  # the second one's brackets are no ASCII

FORMAT = OutputFormat(
    name="poolside_v1",
    regions=ended(REGIONS, _ENDS),
    hidden=("</tool_call>", "<assistant>"),
    inner=INNER,
    stops=_ENDS,
    turn=("<assistant>",),
    template=(("<assistant>", KEY, VALUE),),
    names=("laguna", "poolside"),
)
