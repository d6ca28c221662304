"""Nemotron.

`nemotron_v2`: a JSON list of calls between capital tags. Nemotron Nano 2, and the Nemotrons made from Llama:

    I need the weather.
    </think>

    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]</TOOLCALL>

The prompt opens the reasoning, or opens and closes it.

`nemotron_v3`: Nemotron 3 writes the calls of Qwen 3 Coder after reasoning that the prompt opens.
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.formats.qwen import FUNCTION, PARAMETER, QWEN3_CODER
from modelyard.scanner.grammar import OBJECT, CallGrammar
from modelyard.scanner.json_calls import json_calls

_CALLS, _CALLS_END = "<TOOLCALL>", "</TOOLCALL>"
_ENDS = ("<SPECIAL_12>", "<|eot_id|>")

_V2 = OutputFormat(
    name="nemotron_v2",
    results=("<TOOL_RESPONSE>[", "]</TOOL_RESPONSE>"),
    regions=regions({_CALLS: StartReader(json_calls, (_CALLS_END,))}, closes_alone=True, ends=_ENDS),
    hidden_markers=(_CALLS_END, "<SPECIAL_10>", "<SPECIAL_11>"),
    stop_tokens=_ENDS,
    turn_starts=("<SPECIAL_11>Assistant", "<|start_header_id|>assistant<|end_header_id|>"),
    template_hints=((_CALLS,), (_CALLS, "<AVAILABLE_TOOLS>")),
    name_hints=("nemotron-nano-v2", "nemotron-nano-9b-v2", "nemotron-nano-12b-v2", "llama-3.1-nemotron"),
    grammar=CallGrammar(OBJECT, f"{_CALLS}[", f"]{_CALLS_END}", between=", ", trigger=_CALLS),
)

_V3 = replace(
    QWEN3_CODER,
    name="nemotron_v3",
    template_hints=((FUNCTION, PARAMETER, "truncate_history_thinking"),),
    name_hints=("nemotron-3", "nemotron3", "nemotron_3"),
)

FORMATS = (_V2, _V3)
