"""JSON with no marker around it: a call where that is certain, and otherwise text that is not held back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from modelyard.core.engine import Piece
from modelyard.core.events import BlockDelta, Event
from modelyard.core.request import Tool
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


def _warnings(raw: str, format: str, *, tools: Sequence[Tool] | None = TOOLS, by: int = 1) -> list[str]:
    scanner = Scanner(load(format), tools=tools, new_id=lambda: "c")
    events = [e for at in range(0, len(raw), by) for e in scanner.feed([Piece(raw[at : at + by])])]
    assert _shown([*events, *scanner.finish()]) == raw
    return scanner.warnings


@pytest.mark.parametrize("by", [1, 7, 1000])
@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("llama3_json", 'So: {"name": "fly", "parameters": {"to": "Rome"}}'),
        ("llama3_json", '{"parameters": {"to": "Rome"}, "name": "fly"}'),
        ("llama3_json", '[{"type": "function", "name": "fly" , "parameters": {}}]'),
        ("xlam", '[{"name": "fly", "arguments": {"to": "Rome"}}]'),
        ("pythonic", 'So: [fly(to="Rome")]'),
        ("pythonic", "[ fly( ) ]"),
        ("llama4_pythonic", "[fly(to = 'Rome', when=1)]"),
        ("minimax_m2", '<invoke name="fly">\n<parameter name="to">Rome</parameter>\n</invoke>'),
    ],
)
def test_a_naked_call_of_a_tool_that_nobody_offered_is_text_with_a_warning(format: str, raw: str, by: int) -> None:
    assert _warnings(raw, format, by=by) == ["the model called 'fly', which was not offered: passed on as text"]


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("llama3_json", '[{"name": "Bob", "age": 3}, {"name": "Eve"}]'),
        ("llama3_json", '{"name": "Bob"} has parameters: {"x": 1}'),
        ("pythonic", "[f(x) for x in y] and [len(a) == 3]"),
        ("pythonic", "[link](https://x.org/?a=1)"),
    ],
)
def test_what_only_looks_like_a_call_leaves_no_warning(format: str, raw: str) -> None:
    assert _warnings(raw, format) == []
    assert _warnings(raw, format, by=1000) == []
