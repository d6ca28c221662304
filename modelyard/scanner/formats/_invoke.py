"""Calls as `invoke` tags with one `parameter` tag per value: MiniMax M2, dots, Muse Glimmer, DeepSeek since V3.2.

    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>

Values are exact, including white space. Also read: elements that end with their own tag (`<invoke name="now"/>`), JSON
in place of the parameters, one parameter that wraps all others in JSON, and calls without their block or their closing
tags.
"""

from __future__ import annotations

import re
from functools import cached_property, partial

from msgspec import Struct

from modelyard.core.output_format import StartReader
from modelyard.scanner.arguments import ANY_TYPE, ArgumentWriter, ParameterTags, read_parameters, read_value
from modelyard.scanner.formats._common import function_name
from modelyard.scanner.json_calls import json_arguments
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer, UnknownTool
from modelyard.scanner.output import CallBuilder

_TAG_END = re.compile(rf"[>\n<{SURROGATES}]")
_ATTRIBUTES = re.compile(r"""\s*["']?([^"'=]*?)["']?(?:\s+string\s*=\s*["']?(true|false)["']?)?\s*(/?)\Z""")
_TAG_FOLLOWS = re.compile(r"\s*[<{]")
_WRAPPERS = ("arguments", "input", "parameters")


class InvokeTags:
    """The tags of one family. `opening` and `closing` begin every tag, `blocks` are the names of the outer tag.

    Bare tags are ordinary text: they open a call only for an offered tool. `untyped` are the types of a value for which
    the schema names none. `after` are more markers that can follow a call.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        blocks: tuple[str, ...],
        *,
        bare_block: bool = False,
        bare_invoke: bool = False,
        untyped: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
    ) -> None:
        self._invoke = f"{opening}invoke name="
        self._blocks = tuple(f"{opening}{block}>" for block in blocks)
        self._bare_block, self._bare_invoke, self._untyped = bare_block, bare_invoke, untyped
        self.parameters = ParameterTags(
            f"{opening}parameter name=",
            ">",
            f"{closing}parameter>",
            ends=(f"{closing}invoke>", *(f"{closing}{block}>" for block in blocks)),
            after=(self._invoke, *self._blocks, *after),
            on_lines=False,
        )

    @cached_property
    def readers(self) -> dict[str, StartReader]:
        ends = self.parameters.ends
        invoke = partial(self._read_invoke, is_bare=self._bare_invoke)
        return {
            **dict.fromkeys(self._blocks, StartReader(self._read_block, ends, self._bare_block)),
            self._invoke: StartReader(invoke, ends, self._bare_invoke),
        }

    def _read_block(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        """After the opening of a block: calls one after another."""
        yield from buffer.skip_space()
        if not (yield from buffer.is_next(self._invoke)):
            raise ParseError("expected a call")
        while (yield from buffer.skip_if(self._invoke)):
            yield from self._read_invoke(buffer, calls, is_bare=self._bare_block)
            yield from buffer.skip_space()
        yield from buffer.skip_if(*self.parameters.ends)
        return None

    def _read_invoke(self, buffer: TextBuffer, calls: CallBuilder, *, is_bare: bool) -> Incremental[str | None]:
        tag = yield from _read_tag(buffer)
        name = function_name(tag.name)
        calls.start(name)
        if is_bare and not calls.is_offered:
            raise UnknownTool(name, _TAG_FOLLOWS)
        if tag.is_empty:
            calls.finish("{}")
            return None
        yield from buffer.skip_space()
        if (yield from buffer.peek()) == "{":
            yield from json_arguments(buffer, calls)
        else:
            yield from read_parameters(buffer, self.parameters, ArgumentWriter(calls), self._read_parameter)
        yield from buffer.skip_space()
        yield from buffer.skip_if(self.parameters.ends[0])
        return None

    def _read_parameter(self, buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
        tag = yield from _read_tag(buffer)
        name = tag.name
        if _is_wrapper(name, arguments) and (yield from buffer.peek()) == "{":
            yield from arguments.read_json(buffer)
            yield from buffer.skip_space()
            yield from buffer.skip_if(self.parameters.closing)
            return
        types = arguments.types_of(name) or self._untyped
        if tag.is_text is not None:  # the tag says whether its value is text or JSON
            declared = arguments.types_of(name)
            is_item = "array" in declared and "string" not in declared
            types = ("string",) if tag.is_text and not is_item else declared or ANY_TYPE
        if tag.is_empty:
            arguments.begin(name, types)
            arguments.end()
        else:
            yield from read_value(buffer, self.parameters, arguments, name, types)


def _is_wrapper(name: str, arguments: ArgumentWriter) -> bool:
    """The first parameter is unknown to the tool and has the name that other families give to all of them together."""
    known = arguments.properties
    return name in _WRAPPERS and bool(known) and name not in known and not arguments.given


class _Tag(Struct, frozen=True):
    """`is_text` is the `string` attribute. An empty element ends with its own tag."""

    name: str
    is_text: bool | None
    is_empty: bool


def _read_tag(buffer: TextBuffer) -> Incremental[_Tag]:
    """The rest of a tag after `name=`."""
    found = _ATTRIBUTES.match((yield from buffer.read_until(_TAG_END)))
    if not found or (yield from buffer.peek()) != ">":
        raise ParseError("a tag without an end")
    buffer.skip(1)
    return _Tag(found[1].strip(), None if found[2] is None else found[2] == "true", bool(found[3]))
