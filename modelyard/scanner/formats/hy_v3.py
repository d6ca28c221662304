"""Hy 3: a name, a separator, then keys and values, every tag with the vocabulary's suffix (or none in the preview).

    I need the weather.</think:opensource>Let me look.<tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Paris</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

The prompt opens the reasoning, or opens and closes it.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._hunyuan import FAMILIES
from modelyard.scanner.formats._turns import ended

_ENDS = ("<｜hy_eos:opensource｜>", "<｜hy_eos｜>")
_TURNS = ("<｜hy_Assistant:opensource｜>", "<｜hy_Assistant｜>")
_CALLS = {mark: act for family in FAMILIES for mark, act in family.marks.items()}

FORMAT = OutputFormat(
    name="hy_v3",
    regions=ended(closable(_CALLS, tuple(family.think for family in FAMILIES)), _ENDS),
    hidden=(*(mark for family in FAMILIES for mark in family.hidden), *_TURNS),
    inner=tuple(mark for family in FAMILIES for mark in family.inner),
    stops=_ENDS,
    turn=_TURNS,
    template=(("<tool_sep{}>", "hy_Assistant"), ("<tool_sep>", "<arg_key>")),
    names=("hy3", "hy-3", "hy_v3"),
)
