"""GLM 4.7 and GLM 5: as 4.5, without the line breaks, and the prompt opens the reasoning.

    I need the weather.</think>Let me look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>
    <arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>

(One line; broken here.) An alias: one reader reads both.
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.scanner.formats import glm45
from modelyard.scanner.formats._glm import KEY, VALUE
from modelyard.scanner.grammar import Shape, TaggedBody

_CALL = Shape(
    body=TaggedBody("{}", "<arg_key>{}</arg_key><arg_value>", "</arg_value>"),
    opening="<tool_call>",
    closing="</tool_call>",
    between="",
    trigger="<tool_call>",
)

FORMAT = replace(
    glm45.FORMAT,
    name="glm47",
    template=(("{function-name}" + KEY, VALUE),),
    names=("glm-4.7", "glm4.7", "glm-5", "glm5"),
    grammar=_CALL.grammar,
)
