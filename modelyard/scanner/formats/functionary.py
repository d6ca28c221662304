"""Functionary 3.2: every part of a reply begins with its recipient on a separate line.

    >>>all
    Let me look.>>>get_weather
    {"city": "Paris"}>>>now
    {}<|eot_id|>

The prompt contains the first `>>>`. `all` is the user. Every other recipient is a tool, and its arguments are JSON.
What is sent to `python` may also be code. Three brackets before anything else are ordinary text.

Functionary 3.1 writes calls that Llama writes, too: `llama3_json` reads them.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.formats.llama import INTERPRETERS, read_code
from modelyard.scanner.grammar import CallSyntax, JsonBody
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer, UnknownTool
from modelyard.scanner.output import CallBuilder

_RECIPIENT, _USER = ">>>", "all"
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_NAME_END = re.compile(rf"[\n{{<>{SURROGATES}]")
_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z")
_ARGUMENTS_FOLLOW = re.compile(r"\s*\{")


def _read_recipient(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    name = yield from buffer.read_until(_NAME_END, may_end=True)
    if name.strip() == _USER:
        yield from buffer.skip_if("\n")
        return "text"
    if not _NAME.match(name) or (buffer.is_empty and not calls.knows(name)):
        raise ParseError("ordinary brackets")
    calls.start(name)
    if not calls.is_offered:
        raise UnknownTool(name, _ARGUMENTS_FOLLOW)
    yield from buffer.skip_space()
    if (yield from buffer.peek()) == "{":
        yield from json_arguments(buffer, calls)
    elif name in INTERPRETERS:
        yield from read_code(buffer, calls, name, _ENDS)
    else:
        raise ParseError("the arguments are not an object")
    return None


FORMATS = (
    OutputFormat(
        name="functionary_v32",
        regions=regions({_RECIPIENT: StartReader(_read_recipient, bare=True)}, tags=(), ends=_ENDS),
        has_messages=True,
        stop_tokens=_ENDS,
        turn_starts=("<|start_header_id|>assistant<|end_header_id|>",),
        template_hints=((">>>all", ">>>${recipient}"), (">>>all", "<|start_header_id|>")),
        name_hints=("functionary-small-v3.2", "functionary-medium-v3.2", "functionary-v3.2"),
        calls=CallSyntax(JsonBody(_RECIPIENT, "\n"), between=""),
    ),
)
