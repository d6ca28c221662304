"""Read a whole output at once: what `modelyard parse` prints, and what people debug a model with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from msgspec import Struct

from modelyard.core.engine import Piece
from modelyard.core.events import Finished, Fold, Started, Usage
from modelyard.core.format import Format
from modelyard.core.request import Tool
from modelyard.scanner.formats import load
from modelyard.scanner.scanner import Scanner


class Call(Struct, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class Parsed(Struct, frozen=True):
    reasoning: str
    content: str
    tool_calls: tuple[Call, ...]


def parse(
    chunks: Iterable[str], *, format: Format | str, tools: Sequence[Tool] | None = None, prefill: str = ""
) -> Parsed:
    """Every marker counts as its token, since plain strings do not say. Without `tools` any name is a call."""
    form = load(format) if isinstance(format, str) else format
    ids = count()
    scanner = Scanner(form, tools=tools, prefill=prefill, new_id=lambda: f"call_{next(ids)}", tool_stream=False)
    fold = Fold()
    fold.feed([Started("", "", 0)])
    for chunk in [chunks] if isinstance(chunks, str) else chunks:
        fold.feed(scanner.feed([Piece(chunk)]))
    fold.feed([*scanner.finish(), Finished("end", Usage())])
    reply = fold.reply()
    return Parsed(reply.thinking, reply.text, tuple(Call(c.name, c.arguments) for c in reply.calls))
