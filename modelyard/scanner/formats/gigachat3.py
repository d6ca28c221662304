"""A call in a message of its own: GigaChat 3. Since 3.1 behind a token, in the same message.

    Let me look.<|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Paris"}}

    Let me look.<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}<|message_sep|>

Some vocabularies hold the separators with their line breaks as one token.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.formats._turns import ended
from modelyard.scanner.json_calls import json_calls

_SEP, _ROLE, _CALL = "<|message_sep|>", "<|role_sep|>", "<|function_call|>"
_ROLES = (f"{_ROLE}\n", _ROLE)
_SEPS = (f"{_SEP}\n\n", _SEP)
_READ = StartReader(json_calls, _SEPS)
_CALLS = {_CALL: _READ, **{f"function call{role}": _READ for role in _ROLES}}

FORMAT = OutputFormat(
    name="gigachat3",
    regions=ended(regions(THINK, _CALLS), (*_SEPS, "</s>")),
    hidden=(*_ROLES, "</think>"),
    stops=("</s>",),
    turn=("assistant<|role_sep|>",),
    template=((_SEP, _ROLE), (_SEP, _ROLE, _CALL)),
    names=("gigachat",),
)
