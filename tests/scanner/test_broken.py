"""Calls that break after their first arguments were sent."""

from __future__ import annotations

from modelyard.core.request import Tool
from tests.scanner.reading import calls_of, scan, text_of


def test_a_broken_call_ends_where_it_cannot_be_read_and_the_rest_is_text() -> None:
    raw = '{"name": "get_weather", "parameters": {"city": oops, "days": [{"x": 1}]}} So.\n\nIt rains.<|eom_id|>'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "llama3_json")
        assert calls_of(blocks, complete=False) == [("get_weather", '{"city": ')]
        assert text_of(blocks) == 'oops, "days": [{"x": 1}]}} So.\n\nIt rains.'


def test_a_call_after_the_brackets_of_a_broken_one_counts() -> None:
    inside = '{"name": "search", "parameters": {"options": oops, "x": [{"name": "now", "parameters": {}}]}}'
    blocks = scan(list(inside + '; {"name": "now", "parameters": {}}'), "llama3_json")
    assert calls_of(blocks) == [("now", "{}")]
    assert text_of(blocks) == 'oops, "x": [{"name": "now", "parameters": {}}]}}; '


def test_a_marker_ends_what_is_left_of_a_broken_call() -> None:
    raw = '{"name": "search", "parameters": {"x": [oops<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>'
    blocks = scan(list(raw), "llama3_json")
    assert (calls_of(blocks), text_of(blocks)) == ([("now", "{}")], "oops")


def test_a_word_that_a_limit_cut_off_is_no_text() -> None:
    blocks = scan(list('{"name": "search", "parameters": {"exact": tru'), "llama3_json", cut=True)
    assert (calls_of(blocks, complete=False), text_of(blocks)) == ([("search", '{"exact": ')], "")


def test_so_does_a_call_written_as_python() -> None:
    raw = "[f(x=1, y=g(2), z=[h(a=1)])] So.\nIt rains. [h(a=2)]"
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "pythonic", tools=[Tool("f"), Tool("h")])
        assert calls_of(blocks, complete=False) == [("f", '{"x": 1, "y": ')]
        assert text_of(blocks) == "g(2), z=[h(a=1)])] So.\nIt rains. "
        assert calls_of(blocks) == [("h", '{"a": 2}')]


def test_between_markers_the_rest_of_a_broken_call_is_not_shown() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops, "x": {}}}</tool_call> So.'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "hermes")
        assert (calls_of(blocks, complete=False), text_of(blocks)) == ([("get_weather", '{"city": ')], "So.")


def test_brackets_that_are_never_closed_hide_no_text() -> None:
    raw = '[{"name": "search", "parameters": {"tags": [oops and so on.\nFor ever {"name": "now", "parameters": {}}'
    blocks = scan(list(raw), "llama3_json")
    assert text_of(blocks) == 'oops and so on.\nFor ever {"name": "now", "parameters": {}}'
    assert calls_of(blocks) == []
