"""GigaChat 3: a call in a separate message. Since 3.1 after a token in the same message.

    Let me look.<|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Paris"}}

    Let me look.<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}<|message_sep|>

Some vocabularies contain the separators with their line breaks as one token.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import OBJECT, CallSyntax
from modelyard.scanner.json_calls import json_calls

_SEP, _ROLE, _CALL = "<|message_sep|>", "<|role_sep|>", "<|function_call|>"
_ROLES = (f"{_ROLE}\n", _ROLE)
_SEPS = (f"{_SEP}\n\n", _SEP)
_READER = StartReader(json_calls, _SEPS)

FORMATS = (
    OutputFormat(
        name="gigachat3",
        regions=regions(
            {_CALL: _READER, **{f"function call{role}": _READER for role in _ROLES}}, ends=(*_SEPS, "</s>")
        ),
        hidden_markers=(*_ROLES, "</think>"),
        stop_tokens=("</s>",),
        turn_starts=("assistant<|role_sep|>",),
        template_hints=((_SEP, _ROLE), (_SEP, _ROLE, _CALL)),
        name_hints=("gigachat",),
        calls=CallSyntax(OBJECT, opening=f"{_SEPS[0]}function call{_ROLES[0]}", between=""),
    ),
)
