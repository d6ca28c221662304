"""Read a whole output at once: what `modelyard parse` prints, and what people debug a model with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from msgspec import Struct

from modelyard.core.engine import Piece
from modelyard.core.events import Finished, ReplyBuilder, Started, Usage
from modelyard.core.output_format import OutputFormat, SwitchRegion
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
    chunks: Iterable[str], *, format: OutputFormat | str, tools: Sequence[Tool] | None = None, prefill: str = ""
) -> Parsed:
    """Every marker counts as its token, since plain strings do not say. Without `tools` any name is a call.

    Where no `prefill` says what the prompt opened, a closing tag that comes before every other marker does.
    """
    form = load(format) if isinstance(format, str) else format
    texts = [chunks] if isinstance(chunks, str) else list(chunks)
    opened = prefill or _opened(form, "".join(texts))
    ids = count()
    scanner = Scanner(form, tools=tools, prefill=opened, new_id=lambda: f"call_{next(ids)}", tool_stream=False)
    fold = ReplyBuilder()
    fold.feed([Started("", "", 0)])
    for text in texts:
        fold.feed(scanner.feed([Piece(text)]))
    fold.feed([*scanner.finish(), Finished("end", Usage())])
    reply = fold.reply()
    return Parsed(reply.thinking, reply.text, tuple(Call(c.name, c.arguments) for c in reply.calls))


def _opened(form: OutputFormat, text: str) -> str:
    """The tag that the prompt must have ended with, for the first marker of all is its counterpart."""
    tags = [
        mark
        for region in form.regions.values()
        for mark, act in region.marks.items()
        if isinstance(act, SwitchRegion) and form.regions[act.region].kind == "thinking"
    ]
    found = [(text.find(marker), -len(marker), marker) for marker in form.markers if marker in text]
    first = min(found)[2] if found else None
    return next((tag for tag in tags if first == f"{tag[0]}/{tag[1:]}"), "")
