"""The calls of Hermes in turns that plain words begin: Reka Edge, Reka Flash 3.

    <think>
    I need the weather.
    </think>

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

    <sep>

Turns are `human: …<sep>` and `assistant: …<sep>`. Where thinking is asked for, the prompt opens it. Older models
write `<reasoning>`.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats import hermes
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._thinking import THINK
from modelyard.scanner.formats._turns import ended
from modelyard.scanner.json_calls import json_calls

_TAGS = (*THINK, ("<reasoning>", "</reasoning>"))
_ENDS = ("<sep>", "<|endoftext|>")

FORMAT = OutputFormat(
    name="reka",
    regions=ended(closable({"<tool_call>": StartReader(json_calls, ("</tool_call>",))}, _TAGS), _ENDS),
    hidden=("</tool_call>",),
    stops=_ENDS,
    turn=("<sep>assistant:", "<sep> assistant:"),
    template=(("<sep>", "human: ", "<tool_call>"), ("<sep>", "human: ")),
    names=("reka",),
    grammar=hermes.FORMAT.grammar,
)
