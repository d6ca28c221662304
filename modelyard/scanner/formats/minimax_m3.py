"""MiniMax M3: a namespace token before every tag, parameters as tags of their own name, nested values as elements.

    <mm:think>I need the weather.</mm:think>Let me look.]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="search">]<]minimax[>[<query>rain]<]minimax[>[</query>]<]minimax[>[<tags>
    ]<]minimax[>[<item>Paris]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>[e~[

(Inside the `invoke` lines are broken only here.) Without reasoning a turn begins with `</mm:think>` alone.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import NAME_LIMIT, closable, function_name
from modelyard.scanner.formats._elements import Elements
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable

_NAMESPACE = "]<]minimax[>["
_BLOCK, _BLOCK_END, _INVOKE, _INVOKE_END = "<tool_call>", "</tool_call>", "<invoke name=", "</invoke>"
_NAME_END = re.compile(rf"[>\n<\]{SURROGATES}]")


def _tags(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After a namespace: tags up to the end of the block, each with a namespace of its own."""
    namespace = tape.mark(_NAMESPACE)
    while True:
        yield from tape.space()
        tag = yield from tape.stands(tuple(map(tape.mark, (_BLOCK, _BLOCK_END, _INVOKE, _INVOKE_END))))
        tape.skip(len(tag or ""))
        if tag is None:
            yield from _other(tape)
        elif tag == _INVOKE:
            yield from _invoke(tape, calls)
        if tag == tape.mark(_BLOCK_END):
            return None
        yield from tape.space()
        if not (yield from tape.stands((namespace,))):
            return None
        tape.skip(len(namespace))


def _other(tape: Tape) -> Steps[None]:
    """The rubble of a broken call: behind a namespace every tag is protocol."""
    if (yield from tape.peek()) != "<":
        raise Unreadable("no tag")
    tape.skip(1)
    yield from _name(tape)


def _invoke(tape: Tape, calls: Calls) -> Steps[None]:
    calls.name(function_name((yield from _name(tape))))
    yield from tape.space()
    if (yield from tape.peek()) == "{":
        return (yield from json_arguments(tape, calls))
    root = calls.tool.parameters if calls.tool else {}
    yield from Elements(tape, tape.mark(_NAMESPACE), "tool_call", calls.put, root).read("invoke")
    calls.close()


def _name(tape: Tape) -> Steps[str]:
    name = yield from tape.until(_NAME_END, NAME_LIMIT)
    if (yield from tape.peek()) != ">":
        raise Unreadable("a tag without an end")
    tape.skip(1)
    return name


FORMAT = OutputFormat(
    name="minimax_m3",
    regions=closable({_NAMESPACE: StartReader(_tags)}, (("<mm:think>", "</mm:think>"),)),
    hidden=("[e~[",),
    inner=(_BLOCK, _BLOCK_END, _INVOKE, _INVOKE_END),
    stops=("[e~[",),
    turn=("]~b]ai",),
    template=((_NAMESPACE,), (_NAMESPACE, "<mm:think>")),
    names=("minimax-m3", "minimax_m3"),
)
