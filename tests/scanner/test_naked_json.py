"""JSON with no marker around it: a call where that is certain, and otherwise text that is not held back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from modelyard.core.engine import Piece
from modelyard.core.events import BlockDelta, Event
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load
from tests.scanner.reading import TOOLS, calls_of, scan, text_of


def _shown(events: Sequence[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, BlockDelta))


@pytest.mark.parametrize("head", ['[{"age": ', '{"x": ', '[{"name": "Bob", ', "[1, ", '```json\n[{"rows": '])
def test_json_that_is_no_call_flows_at_once(head: str) -> None:
    ids = count()
    scanner = Scanner(load("xlam"), tools=TOOLS, new_id=lambda: f"call_{next(ids)}")
    assert _shown(scanner.feed([Piece(c) for c in head + "3"])) == head + "3"


def test_arguments_of_a_bare_call_are_streamed() -> None:
    ids = count()
    scanner = Scanner(load("xlam"), tools=TOOLS, new_id=lambda: f"call_{next(ids)}")
    events = scanner.feed([Piece('[{"name": "write_file", "arguments": {"content": "abc')])
    assert _shown(events) == '{"content": "abc'


def test_any_name_is_a_call_where_no_tools_are_known() -> None:
    blocks = scan(['[{"name": "f", "arguments": {"a": 1}}] [{"name": "Bob"}]'], "xlam", tools=None)
    assert calls_of(blocks) == [("f", '{"a": 1}')]
    assert text_of(blocks) == '[{"name": "Bob"}]'


def test_a_list_of_a_call_and_something_else_loses_nothing() -> None:
    blocks = scan(['[{"name": "now", "arguments": {}}, {"name": "Bob", "age": 3}]'], "xlam")
    assert calls_of(blocks) == [("now", "{}")]
    assert text_of(blocks) == ', {"name": "Bob", "age": 3}]'
