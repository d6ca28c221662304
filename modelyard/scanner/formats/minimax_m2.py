"""MiniMax M2, M2.1, M2.5 and M2.7: a block of `invoke` tags, every value as text.

    I need the weather.
    </think>

    Let me look.
    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    <parameter name="days">3</parameter>
    </invoke>
    <invoke name="now">
    </invoke>
    </minimax:tool_call>[e~[

The prompt opens the reasoning.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._invoke import tagged
from modelyard.scanner.grammar import Shape, TaggedBody

_DIALECT = tagged("<", "</", ("minimax:tool_call",), plain_block=False, plain_invoke=True)

_CALL = Shape(
    body=TaggedBody('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n"),
    begin="<minimax:tool_call>\n",
    closing="</invoke>\n",
    between="",
    end="</minimax:tool_call>",
    trigger="<minimax:tool_call>",
)

FORMAT = OutputFormat(
    name="minimax_m2",
    regions=closable(_DIALECT.marks()),
    hidden=("</minimax:tool_call>", "[e~["),
    inner=("</invoke>", "<parameter name=", "</parameter>"),
    stops=("[e~[",),
    turn=("]~b]ai",),
    template=(("<minimax:tool_call>", "<invoke name="),),
    names=("minimax-m2", "minimax_m2"),
    grammar=_CALL.grammar,
)
