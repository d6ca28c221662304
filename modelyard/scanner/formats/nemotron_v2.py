"""A JSON list of calls between capital tags: Nemotron Nano 2, and the Nemotrons that were made of Llama.

    I need the weather.
    </think>

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]</TOOLCALL>

The prompt opens the reasoning, or opens and closes it.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._turns import ended
from modelyard.scanner.grammar import JsonBody, Shape
from modelyard.scanner.json_calls import json_calls

_CALLS, _END = "<TOOLCALL>", "</TOOLCALL>"
_ENDS = ("<SPECIAL_12>", "<|eot_id|>")

_SHAPE = Shape(
    body=JsonBody('{"name": "', '", "arguments": ', "}"),
    begin=f"{_CALLS}[",
    between=", ",
    end=f"]{_END}",
    trigger=_CALLS,
)

FORMAT = OutputFormat(
    name="nemotron_v2",
    regions=ended(closable({_CALLS: StartReader(json_calls, (_END,))}), _ENDS),
    hidden=(_END, "<SPECIAL_10>", "<SPECIAL_11>"),
    stops=_ENDS,
    turn=("<SPECIAL_11>Assistant", "<|start_header_id|>assistant<|end_header_id|>"),
    template=((_CALLS,), (_CALLS, "<AVAILABLE_TOOLS>")),
    names=(
        "nemotron-nano-v2",
        "nemotron-nano-9b-v2",
        "nemotron-nano-12b-v2",
        "llama-3.1-nemotron",
    ),
    grammar=_SHAPE.grammar,
)
