"""JSON without markers is a call only if that is certain. Otherwise it is text that is not held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from modelyard.core.events import Event
from modelyard.core.tokenizer import Piece
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load
from tests.scanner.helpers import TOOLS, calls_of, delta_texts, scan, text_of


def _joined(events: Sequence[Event]) -> str:
    return "".join(delta_texts(events))


@pytest.mark.parametrize("head", ['[{"age": ', '{"x": ', '[{"name": "Bob", ', "[1, ", '```json\n[{"rows": '])
def test_json_that_is_not_a_call_is_not_held_back(head: str) -> None:
    scanner = Scanner(load("xlam"), tools=TOOLS, new_id=lambda: "c")
    assert _joined(scanner.feed([Piece(c) for c in head + "3"])) == head + "3"


def test_arguments_of_a_bare_call_are_streamed() -> None:
    scanner = Scanner(load("xlam"), tools=TOOLS, new_id=lambda: "c")
    events = scanner.feed([Piece('[{"name": "write_file", "arguments": {"content": "abc')])
    assert _joined(events) == '{"content": "abc'


def test_every_name_is_a_call_without_a_list_of_tools() -> None:
    blocks = scan(['[{"name": "f", "arguments": {"a": 1}}] [{"name": "Bob"}]'], "xlam", tools=None)
    assert calls_of(blocks) == [("f", '{"a": 1}')]
    assert text_of(blocks) == '[{"name": "Bob"}]'


def test_a_list_with_a_call_and_another_object_loses_nothing() -> None:
    blocks = scan(['[{"name": "now", "arguments": {}}, {"name": "Bob", "age": 3}]'], "xlam")
    assert calls_of(blocks) == [("now", "{}")]
    assert text_of(blocks) == ', {"name": "Bob", "age": 3}]'


def _warnings(raw: str, format: str, size: int) -> list[str]:
    scanner = Scanner(load(format), tools=TOOLS, new_id=lambda: "c")
    events = [e for start in range(0, len(raw), size) for e in scanner.feed([Piece(raw[start : start + size])])]
    assert _joined([*events, *scanner.finish()]) == raw
    return scanner.warnings


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
def test_a_bare_call_of_a_tool_that_is_not_offered_is_text_with_a_warning(format: str, raw: str) -> None:
    for size in (1, 7, 1000):
        assert _warnings(raw, format, size) == ["the model called 'fly', which was not offered: passed on as text"]


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("llama3_json", '[{"name": "Bob", "age": 3}, {"name": "Eve"}]'),
        ("llama3_json", '{"name": "Bob"} has parameters: {"x": 1}'),
        ("pythonic", "[f(x) for x in y] and [len(a) == 3]"),
        ("pythonic", "[link](https://x.org/?a=1)"),
    ],
)
def test_text_that_looks_like_a_call_causes_no_warning(format: str, raw: str) -> None:
    assert _warnings(raw, format, 1) == []
    assert _warnings(raw, format, 1000) == []
