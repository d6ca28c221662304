"""Shared by several families: regions with reasoning tags, and function names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from modelyard.core.output_format import Reader, Region, StartReader, SwitchRegion
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

THINK = (("<think>", "</think>"), ("<thinking>", "</thinking>"))
_NAME = re.compile(r"\w[\w-]*(?:[.:/][\w-]+)*")


def regions(
    readers: Mapping[str, StartReader] | None = None,
    *,
    tags: tuple[tuple[str, str], ...] = THINK,
    closes_alone: bool = False,
    ends: tuple[str, ...] = (),
) -> dict[str, Region]:
    """Visible text and one region per pair of reasoning tags. The readers start in all of them.

    `closes_alone`: the closing tag may come without an opening one, if there is nothing to think about. `ends` are
    markers that end a message: they lead to visible text, and the line breaks around them are theirs.
    """
    shared: dict[str, SwitchRegion | StartReader] = dict(readers or {})
    after = {end: SwitchRegion("text") for end in ends}
    closing = {close: SwitchRegion("text") for _, close in tags} if closes_alone else {}
    text = Region("text", {**{tag: SwitchRegion(tag) for tag, _ in tags}, **shared, **closing, **after})
    thinking = {tag: Region("thinking", {close: SwitchRegion("text"), **shared, **after}) for tag, close in tags}
    return {"text": text, **thinking}


def at_reply_start(region: str | None) -> Reader:
    """For a sentence that is a marker only as the first words of a reply. It leads to the region."""

    def read(_: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        yield from ()
        if calls.kind != "text" or not calls.is_first:
            raise ParseError("ordinary words")
        return region

    return read


def function_name(raw: str) -> str:
    """Prose in the place of a name is a ParseError."""
    name = raw.strip().strip("\"'")
    if not _NAME.fullmatch(name):
        raise ParseError(f"{name[:20]!r} is not a name")
    return name
