"""Calls that break after their first arguments were sent."""

from __future__ import annotations

import pytest

from modelyard.core.engine import Piece
from modelyard.core.request import Tool
from modelyard.scanner.formats import load, names
from tests.scanner.reading import calls_of, scan, text_of, tokens


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


def test_between_markers_the_rest_of_a_broken_call_is_text_too() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops, "x": {}}}</tool_call> So.'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "hermes")
        assert calls_of(blocks, complete=False) == [("get_weather", '{"city": ')]
        assert text_of(blocks) == 'oops, "x": {}}} So.'


def test_and_so_it_is_where_the_closing_tag_never_comes() -> None:
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}} So. It rains.'
    for chunks in ([raw], list(raw)):
        assert text_of(scan(chunks, "hermes")) == "oops}} So. It rains."


def test_tags_that_count_only_inside_of_calls_are_no_text_up_to_the_end_of_the_broken_one() -> None:
    call = '<function name="now"><param name="x"><![CDATA[1]]></param>oops <param name="y">2</param></function>'
    raw = f"{call} Say </param>."
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "minicpm5")
        assert calls_of(blocks, complete=False) == [("now", '{"x": 1')]
        assert text_of(blocks) == 'oops "y">2 Say </param>.'


def test_a_closing_tag_that_is_no_marker_ends_the_broken_call() -> None:
    raw = '<invoke name="now">{"x": oops}</invoke> Write </invoke>.'
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "minimax_m2")
        assert calls_of(blocks, complete=False) == [("now", '{"x": ')]
        assert text_of(blocks) == "oops} Write </invoke>."


def test_brackets_that_are_never_closed_hide_no_text() -> None:
    raw = '[{"name": "search", "parameters": {"tags": [oops and so on.\nFor ever {"name": "now", "parameters": {}}'
    blocks = scan(list(raw), "llama3_json")
    assert text_of(blocks) == 'oops and so on.\nFor ever {"name": "now", "parameters": {}}'
    assert calls_of(blocks) == []


@pytest.mark.parametrize("raw", ["[f(x=b'z'), h(a=1)] So.", "[g(x=1), h(a=1)] So.", "[f(x=1, y=z(2)), h(a=1)] So."])
def test_a_member_of_a_list_does_not_take_the_others_with_it(raw: str) -> None:
    for chunks in ([raw], list(raw)):
        blocks = scan(chunks, "pythonic", tools=[Tool("f"), Tool("h")], tool_stream=False)
        assert calls_of(blocks) == [("h", '{"a": 1}')]
        assert text_of(blocks) == raw.replace(", h(a=1)]", "")


def test_nor_where_a_line_is_all_that_stands_between_them() -> None:
    blocks = scan(list("<function_calls>\nf(x=b'z')\nnow()\n</function_calls> So."), "olmo3")
    assert calls_of(blocks) == [("now", "{}")]
    assert text_of(blocks).split() == ["f(x=b'z')", "So."]


def test_prose_in_brackets_hides_no_call() -> None:
    raw = "See [f(x [h(a=1)] and [f(x=y), see h] there."
    blocks = scan(list(raw), "pythonic", tools=[Tool("f"), Tool("h")], tool_stream=False)
    assert calls_of(blocks) == [("h", '{"a": 1}')]
    assert text_of(blocks) == "See [f(x  and [f(x=y), see h] there."


TOOL = Tool("get_weather", parameters={"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})


@pytest.mark.parametrize("format", names())
def test_no_word_is_lost_after_whatever_marker_a_call_breaks(format: str) -> None:
    form = load(format)
    specials = tokens(form)
    for marker in specials:
        call = '{"name": "get_weather", "arguments": {"city": "Paris", oops'
        blocks = scan([Piece(marker, special=True), Piece(call)], format, specials=specials, tools=[TOOL])
        assert "oops" in "".join(block.text for block in blocks), marker
