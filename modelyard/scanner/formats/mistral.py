"""Mistral, in all its generations: calls after `[TOOL_CALLS]`, reasoning between `[THINK]` tags.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123def"}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}
    [TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}
    [THINK]I need the weather.[/THINK]Let me look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

Some detokenizers lose `[ARGS]`, so the arguments may follow the name at once. A tool that takes none is called by its
name alone. A word that stands before a list of calls is just that. The first Magistral wrote `<think>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from modelyard.core.output_format import GrammarContext, OutputFormat, StartReader
from modelyard.core.request import Constraint, Tool, ToolChoice
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import function_name
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.grammar import JsonBody, Shape
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable

_CALLS, _ARGS, _ID, _END = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"
_TAGS = (("[THINK]", "[/THINK]"), *THINK)
_NAME_END = re.compile(rf"[\[{{<\n{SURROGATES}]")
_NAME_LIMIT = 128


def _calls(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    if (yield from _is_json(tape)):
        return (yield from json_calls(tape, calls))
    name = yield from _word(tape)
    if (yield from _is_json(tape)) and (yield from tape.peek()) == "[":
        calls.say(name)
        return (yield from json_calls(tape, calls))
    if here := (yield from tape.stands((tape.mark(_ID),))):
        tape.skip(len(here))
        yield from _word(tape)
    if here := (yield from tape.stands((tape.mark(_ARGS),))):
        tape.skip(len(here))
    yield from tape.space()
    if (yield from tape.peek()) == "{":
        calls.name(name)
        yield from json_arguments(tape, calls)
    else:
        yield from _without_arguments(tape, calls, name)
    return None


def _without_arguments(tape: Tape, calls: Calls, name: str) -> Steps[None]:
    """A name alone is a call where nothing else stands and the tool was offered."""
    calls.name(function_name(name))
    over = yield from tape.stands((tape.mark(_CALLS), tape.mark(_END)))
    if not calls.is_known or not (over or (tape.is_empty and not tape.cut)):
        raise Unreadable("a name without arguments")
    calls.put("{}")
    calls.close()


def _is_json(tape: Tape) -> Steps[bool]:
    """An object or a list of them; other brackets may be the family's tokens."""
    two = (yield from tape.ahead(2)) if (yield from tape.peek()) in ("{", "[") else ""
    return two[:1] == "{" or (two[:1] == "[" and two[1:] in ("", "{", " ", "\n"))


def _word(tape: Tape) -> Steps[str]:
    """A name or an id, without spaces inside; it may be the last that the model said."""
    word = ""
    while (char := (yield from tape.peek())) and not _NAME_END.match(char) and len(word) <= _NAME_LIMIT:
        word += tape.skip(1)
    word = word.strip()
    if not word or " " in word or len(word) > _NAME_LIMIT:
        raise Unreadable("no name stands here")
    return word


_NAMED = Shape(
    body=JsonBody("", _ARGS),
    opening=_CALLS,
    between="",
    trigger=_CALLS,
    thought=_TAGS[0],
)
_LISTED = Shape(
    body=JsonBody('{"name": "', '", "arguments": ', "}"),
    begin=f"{_CALLS}[",
    between=", ",
    end="]",
    trigger=_CALLS,
    thought=_TAGS[0],
)


def _grammar(tools: Sequence[Tool], choice: ToolChoice, place: GrammarContext = GrammarContext()) -> Constraint | None:
    """As this generation writes it: the newer ones have a token before the arguments."""
    return (_NAMED if _ARGS in place.specials else _LISTED).grammar(tools, choice, place)


FORMAT = OutputFormat(
    name="mistral",
    regions=regions(_TAGS, {_CALLS: StartReader(_calls)}),
    hidden=(_ARGS, _ID, "[/THINK]", "</think>", _END),
    stops=(_END,),
    turn=("[/INST]", "[/TOOL_RESULTS]", _END),
    template=((_CALLS,), (_CALLS, "[AVAILABLE_TOOLS]"), ("[SYSTEM_PROMPT]", "[THINK]")),
    names=("mistral", "ministral", "devstral", "magistral", "mixtral", "codestral"),
    grammar=_grammar,
)
