"""How every output format closes its reasoning."""

from __future__ import annotations

import pytest

from modelyard.core.events import BlockDelta, BlockStart
from modelyard.core.output_format import OutputFormat, ReasoningBlock
from modelyard.core.tokenizer import Piece
from modelyard.scanner import formats
from modelyard.scanner.scanner import Scanner

CASES = [(f, block) for f in map(formats.load, formats.names()) for block in f.reasoning_blocks]


@pytest.mark.parametrize(("output_format", "block"), CASES, ids=[f"{f.name} {b.start}" for f, b in CASES])
def test_what_closes_the_reasoning_begins_the_answer(output_format: OutputFormat, block: ReasoningBlock) -> None:
    scanner = Scanner(output_format, new_id=str)
    events = (
        scanner.feed([Piece(block.start), Piece("Hm, "), Piece(block.closing), Piece("It rains.")]) + scanner.finish()
    )
    kinds = {event.index: event.kind for event in events if isinstance(event, BlockStart)}
    texts = dict.fromkeys(kinds, "")
    for event in events:
        if isinstance(event, BlockDelta):
            texts[event.index] += event.text
    assert [(kinds[index], text.strip()) for index, text in texts.items()] == [
        ("thinking", "Hm,"),
        ("text", "It rains."),
    ]
