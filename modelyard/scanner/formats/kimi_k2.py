"""Kimi K2: every call between tokens, its name in an id that counts the calls.

    <think>I need the weather.</think>Let me look.<|tool_calls_section_begin|>
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
    <|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>

The tokens around the section, and those that end a call, are often missing. Some versions write `tool_call_section`. A
tool that takes no arguments may be called by its id alone. An id that holds no name (`0`, `call_3`) is that of the only
tool on offer which takes such arguments.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable
from modelyard.scanner.repair import JsonValue

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTIONS = tuple(f"<|{word}_section_{end}|>" for word in ("tool_calls", "tool_call") for end in ("begin", "end"))
_ID_END = re.compile(rf"[<{{\n{SURROGATES}]")
_ID_LIMIT = 256
_COUNT = re.compile(r":\d+\Z")
_BARE_ID = re.compile(r"(?:\d+|(?:call|tool|toolu|chatcmpl)[_-][\w-]*\d[\w-]*)\Z")
_NAME = re.compile(r"[\w.:/-]*[\w-]\Z")


def _call(tape: Tape, calls: Calls) -> Steps[str | None]:
    yield from tape.space()
    given = (yield from tape.until(_ID_END, _ID_LIMIT)).strip()
    name = _COUNT.sub("", given).removeprefix("functions.")
    yield from tape.space()
    here = yield from tape.stands((tape.mark(_ARGUMENTS), tape.mark(_END)))
    if not here or not _NAME.match(name):
        raise Unreadable("no id stands here")
    calls.name(name)
    if not calls.is_known and _BARE_ID.match(name):
        return (yield from _unnamed(tape, calls, name))
    if here == tape.mark(_ARGUMENTS):
        tape.skip(len(here))
    elif name == given or not calls.is_known:
        raise Unreadable("no arguments stand here, and this may be prose")
    yield from tape.space()
    if (yield from tape.stands((tape.mark(_END), tape.mark(_BEGIN)))):
        calls.put("{}")
        calls.close()
    else:
        yield from json_arguments(tape, calls)
    return None


def _unnamed(tape: Tape, calls: Calls, given: str) -> Steps[str | None]:
    """The arguments wait until it is certain whose they are."""
    if here := (yield from tape.stands((tape.mark(_ARGUMENTS),))):
        tape.skip(len(here))
    yield from tape.space()
    parts: list[str] = []
    yield from JsonValue(tape, parts.append).read()
    arguments = "".join(parts)
    calls.name(calls.taking(arguments) or given)
    calls.put(arguments)
    calls.close()
    return None


FORMAT = OutputFormat(
    name="kimi_k2",
    regions=regions(THINK, {_BEGIN: StartReader(_call, (_END,))}),
    hidden=(_ARGUMENTS, _END, *_SECTIONS, "</think>", "<|im_end|>"),
    stops=("<|im_end|>",),
    turn=("<|im_middle|>",),
    template=((_BEGIN, _ARGUMENTS),),
    names=("kimi-k2", "kimi_k2"),
)
