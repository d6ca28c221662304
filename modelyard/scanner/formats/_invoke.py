"""Calls as `invoke` tags with one `parameter` tag a value: MiniMax M2, and DeepSeek since V3.2.

    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>

Values stand between the tags as they are, white space included. Also read: JSON in place of the parameters, one
parameter that wraps all the others in JSON, and calls that forgot their block or their closing tags.
"""

from __future__ import annotations

import re
from functools import partial

from msgspec import Struct

from modelyard.core.output_format import StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import NAME_LIMIT, function_name
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unoffered, Unreadable
from modelyard.scanner.parameters import Tags, Value
from modelyard.scanner.repair import JsonValue
from modelyard.scanner.typed import ANY, TypedArguments

_TAG_END = re.compile(rf"[>\n<{SURROGATES}]")
_ATTRIBUTES = re.compile(r"""\s*["']?([^"'=]*)["']?(?:\s+string\s*=\s*["']?(true|false)["']?)?\s*\Z""")
_TAG_FOLLOWS = re.compile(r"\s*[<{]")
_WRAPPERS = ("arguments", "input", "parameters")


class Dialect(Struct, frozen=True):
    """The tags of one family. Plain ones are ordinary text: they open a call only for a tool that was offered."""

    invoke: str
    tags: Tags
    blocks: tuple[str, ...]
    plain_block: bool
    plain_invoke: bool

    def marks(self) -> dict[str, StartReader]:
        ends = self.tags.ends
        return {
            **dict.fromkeys(self.blocks, StartReader(partial(_block, self), ends, self.plain_block)),
            self.invoke: StartReader(partial(_invoke, self, self.plain_invoke), ends, self.plain_invoke),
        }


def tagged(opening: str, closing: str, blocks: tuple[str, ...], *, plain_block: bool, plain_invoke: bool) -> Dialect:
    """`opening` and `closing` begin every tag."""
    invoke, ends = f"{opening}invoke name=", (f"{closing}invoke>", *(f"{closing}{b}>" for b in blocks))
    opened = tuple(f"{opening}{b}>" for b in blocks)
    tags = Tags(f"{opening}parameter name=", ">", f"{closing}parameter>", ends, (invoke, *opened), lines=False)
    return Dialect(invoke, tags, opened, plain_block, plain_invoke)


def _block(of: Dialect, tape: Tape, calls: Calls) -> Steps[str | None]:
    """After a block's opening: calls one after another."""
    invoke, ends = tape.mark(of.invoke), tuple(map(tape.mark, of.tags.ends))
    yield from tape.space()
    if not (yield from tape.stands((invoke,))):
        raise Unreadable("no call stands here")
    while (yield from tape.stands((invoke,))):
        tape.skip(len(invoke))
        yield from _invoke(of, of.plain_block, tape, calls)
        yield from tape.space()
    if here := (yield from tape.stands(ends)):
        tape.skip(len(here))
    return None


def _invoke(of: Dialect, plain: bool, tape: Tape, calls: Calls) -> Steps[str | None]:
    name = function_name((yield from _tag(tape))[0])
    calls.name(name)
    if plain and not calls.is_known:
        raise Unoffered(name, _TAG_FOLLOWS)  # no call, but talk of one
    yield from tape.space()
    if (yield from tape.peek()) == "{":
        yield from json_arguments(tape, calls)
    else:
        yield from _parameters(of.tags, tape, calls)
    yield from _close(tape, of.tags.ends[0])
    return None


def _parameters(tags: Tags, tape: Tape, calls: Calls) -> Steps[None]:
    arguments, opening = TypedArguments(calls), tape.mark(tags.opening)
    others = tuple(map(tape.mark, (*tags.ends, *tags.after)))
    while calls.is_open:
        yield from tape.space()
        here = yield from tape.stands((opening, *others))
        if here == opening:
            tape.skip(len(here))
            yield from _parameter(tags, tape, calls, arguments)
        elif here or ((yield from tape.peek()) == "" and not tape.cut):
            arguments.close()
        else:
            raise Unreadable("neither a parameter nor the end of the call")


def _parameter(tags: Tags, tape: Tape, calls: Calls, arguments: TypedArguments) -> Steps[None]:
    name, is_text = yield from _tag(tape)
    if _wraps(name, arguments) and (yield from tape.peek()) == "{":
        yield from JsonValue(tape, calls.put).read()
        calls.close()
        return (yield from _close(tape, tags.closing))
    arguments.begin(name, _allowed(name, is_text, arguments))
    if not (yield from Value(tape, tags, arguments).read()) and tape.cut:
        raise Unreadable("cut off inside a parameter")
    arguments.end()


def _wraps(name: str, arguments: TypedArguments) -> bool:
    """The first parameter is none of the tool's own, but what other families call all of them together."""
    known = arguments.properties
    return name in _WRAPPERS and bool(known) and name not in known and not arguments.given


def _allowed(name: str, is_text: str | None, arguments: TypedArguments) -> tuple[str, ...] | None:
    """The tag itself may say whether its value is text or JSON."""
    if is_text is None:
        return None
    return ("string",) if is_text == "true" else arguments.allowed(name) or ANY


def _tag(tape: Tape) -> Steps[tuple[str, str | None]]:
    """The rest of a tag after `name=`: the name, and the `string` attribute if there is one."""
    raw = yield from tape.until(_TAG_END, NAME_LIMIT)
    found = _ATTRIBUTES.match(raw)
    if not found or (yield from tape.peek()) != ">":
        raise Unreadable("a tag without an end")
    tape.skip(1)
    return found[1].strip(), found[2]


def _close(tape: Tape, tag: str) -> Steps[None]:
    yield from tape.space()
    if here := (yield from tape.stands((tape.mark(tag),))):
        tape.skip(len(here))
