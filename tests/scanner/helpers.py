"""Run a scanner over a text that is cut in some way, and check that its events keep the contract."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from msgspec import Struct

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event
from modelyard.core.output_format import OutputFormat
from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load

TOOLS = (
    Tool(
        "get_weather",
        parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    ),
    Tool("write_file", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}),
    Tool(
        "search",
        parameters={
            "properties": {
                "query": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "exact": {"type": "boolean"},
                "ratio": {"type": "number"},
            }
        },
    ),
    Tool("now", parameters={"type": "object", "properties": {}}),
)


class ScannedBlock(Struct):
    """A block as the client gets it."""

    kind: str
    text: str = ""
    name: str = ""
    complete: bool = True


def pieces(text: str, specials: Iterable[str] = ()) -> list[Piece]:
    """The text as one piece, or with each of these markers as a special token."""
    if not specials:
        return [Piece(text)]
    split = re.split("(" + "|".join(map(re.escape, specials)) + ")", text)
    return [Piece(part, special=i % 2 == 1) for i, part in enumerate(split) if part]


def marker_tokens(form: OutputFormat) -> list[str]:
    """The markers that a vocabulary can contain as tokens, the longest first."""
    return sorted((m for m in form.markers if not m.endswith("=")), key=len, reverse=True)


def scan(
    chunks: Sequence[Piece | str], format: str | OutputFormat, *, truncated: bool = False, **options: Any
) -> list[ScannedBlock]:
    ids = count()
    form = load(format) if isinstance(format, str) else format
    scanner = Scanner(form, **{"tools": TOOLS, "new_id": lambda: f"call_{next(ids)}"} | options)
    events: list[Event] = []
    for chunk in chunks:
        events += scanner.feed([chunk if isinstance(chunk, Piece) else Piece(chunk)])
    return blocks_of(events + scanner.finish(truncated))


def blocks_of(events: Iterable[Event]) -> list[ScannedBlock]:
    """The blocks of a stream that keeps the contract: counted from 0, one open at a time, no empty delta."""
    blocks: list[ScannedBlock] = []
    is_open = False
    for event in events:
        if isinstance(event, BlockStart):
            assert not is_open
            assert event.index == len(blocks)
            blocks.append(ScannedBlock(event.kind, name=event.name))
            is_open = True
        elif isinstance(event, BlockDelta):
            assert is_open
            assert event.text or event.logprobs
            blocks[event.index].text += event.text
        elif isinstance(event, BlockEnd):
            assert is_open
            assert event.index == len(blocks) - 1
            blocks[-1].complete = event.complete
            is_open = False
        else:
            raise AssertionError(event)
    assert not is_open
    return blocks


def delta_texts(events: Iterable[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, BlockDelta)]


def text_of(blocks: Iterable[ScannedBlock], kind: str = "text") -> str:
    return "".join(b.text for b in blocks if b.kind == kind)


def calls_of(blocks: Iterable[ScannedBlock], complete: bool = True) -> list[tuple[str, str]]:
    return [(b.name, b.text) for b in blocks if b.kind == "tool_call" and b.complete == complete]
