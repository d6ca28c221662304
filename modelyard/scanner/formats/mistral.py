"""Mistral, all generations: calls after `[TOOL_CALLS]`, reasoning between `[THINK]` tags.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123def"}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}
    [TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}
    [THINK]I need the weather.[/THINK]Let me look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

Some detokenizers lose `[ARGS]`, so the arguments may follow the name directly. A tool without arguments is called by
its name alone. A word before a list of calls is text. The first Magistral writes `<think>`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from modelyard.core.output_format import Dumps, GrammarContext, NamedCalls, OutputFormat, StartReader
from modelyard.core.request import Constraint, Tool, ToolChoice
from modelyard.scanner.formats._common import THINK, function_name, regions
from modelyard.scanner.grammar import OBJECT, CallGrammar, JsonBody
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import NAME_LIMIT, SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_CALLS, _ARGS, _ID, _END = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"
_TAGS = (("[THINK]", "[/THINK]"), *THINK)
_NAME_END = re.compile(rf"[\[{{<\n{SURROGATES}]")


def _read_calls(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    yield from buffer.skip_space()
    if (yield from _is_json(buffer)):
        return (yield from json_calls(buffer, calls))
    name = yield from _read_word(buffer)
    if (yield from _is_json(buffer)) and (yield from buffer.peek()) == "[":
        calls.show_message("text", name)
        return (yield from json_calls(buffer, calls))
    if (yield from buffer.skip_if(_ID)):
        yield from _read_word(buffer)
    yield from buffer.skip_if(_ARGS)
    yield from buffer.skip_space()
    if (yield from buffer.peek()) == "{":
        calls.start(name)
        yield from json_arguments(buffer, calls)
        return None
    calls.start(function_name(name))
    may_end = not (buffer.truncated or calls.needs_arguments)
    is_over = (yield from buffer.is_next(_CALLS, _END)) or (buffer.is_empty and may_end)
    if not calls.is_offered or not is_over:
        raise ParseError("a name without arguments")
    calls.finish("{}")
    return None


def _is_json(buffer: TextBuffer) -> Incremental[bool]:
    """An object or a list of objects comes next. Other brackets may be tokens of the family."""
    two = (yield from buffer.lookahead(2)) if (yield from buffer.peek()) in ("{", "[") else ""
    return two[:1] == "{" or (two[:1] == "[" and two[1:] in ("", "{", " ", "\n"))


def _read_word(buffer: TextBuffer) -> Incremental[str]:
    """A name or an id without spaces. It may be the last word of the output."""
    word = ""
    while (char := (yield from buffer.peek())) and not _NAME_END.match(char) and len(word) <= NAME_LIMIT:
        word += buffer.skip(1)
    word = word.strip()
    if not word or " " in word or len(word) > NAME_LIMIT:
        raise ParseError("expected a name")
    return word


_NAMED_CALLS = CallGrammar(JsonBody("", _ARGS), opening=_CALLS, between="", trigger=_CALLS, reasoning=_TAGS[0])
_LISTED_CALLS = CallGrammar(OBJECT, f"{_CALLS}[", "]", between=", ", trigger=_CALLS, reasoning=_TAGS[0])


class _Calls:
    """The newer generations have a token before the arguments."""

    def __call__(
        self, tools: Sequence[Tool], choice: ToolChoice, context: GrammarContext = GrammarContext()
    ) -> Constraint | None:
        return (_NAMED_CALLS if _ARGS in context.specials else _LISTED_CALLS)(tools, choice, context)

    def write(self, calls: NamedCalls, dumps: Dumps, specials: Container[str] = ()) -> str:
        return (_NAMED_CALLS if _ARGS in specials else _LISTED_CALLS).write(calls, dumps)


FORMATS = (
    OutputFormat(
        name="mistral",
        regions=regions({_CALLS: StartReader(_read_calls)}, tags=_TAGS),
        hidden_markers=(_ARGS, _ID, "[/THINK]", "</think>", _END),
        stop_tokens=(_END,),
        turn_starts=("[/INST]", "[/TOOL_RESULTS]", _END),
        results=("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        template_hints=((_CALLS,), (_CALLS, "[AVAILABLE_TOOLS]"), ("[SYSTEM_PROMPT]", "[THINK]")),
        name_hints=("mistral", "ministral", "devstral", "magistral", "mixtral", "codestral"),
        grammar=_Calls(),
    ),
)
