"""GLM 4.5 and 4.6: each tag of a call on a line of its own.

<think>I need the weather.</think>
Let me look.
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._glm import HIDDEN, INNER, KEY, REGIONS, STOPS, TURN, VALUE
from modelyard.scanner.grammar import Shape, TaggedBody

_CALL = Shape(
    body=TaggedBody("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
    opening="<tool_call>",
    closing="</tool_call>",
    trigger="<tool_call>",
)

FORMAT = OutputFormat(
    name="glm45",
    regions=REGIONS,
    hidden=HIDDEN,
    inner=INNER,
    stops=STOPS,
    turn=TURN,
    template=((KEY, VALUE),),
    names=("glm-4.5", "glm-4.6", "glm4.5", "glm4.6"),
    grammar=_CALL.grammar,
)
