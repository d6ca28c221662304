"""Block events, stop strings and log probabilities."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart
from modelyard.core.request import Tool
from modelyard.core.tokenizer import IdLogprob
from modelyard.scanner.output import (
    BlockWriter,
    LogprobTracker,
    StopStrings,
    accepts,
    custom_input,
    cut_input,
    tools_by_name,
)


def test_text_of_another_kind_closes_the_open_block() -> None:
    blocks = BlockWriter()
    blocks.write("thinking", "a")
    blocks.write("text", "b")
    assert blocks.take_events() == [
        BlockStart(0, "thinking"),
        BlockDelta(0, "a"),
        BlockEnd(0),
        BlockStart(1, "text"),
        BlockDelta(1, "b"),
    ]
    assert blocks.take_events() == []


def test_closing_without_an_open_block_emits_nothing() -> None:
    blocks = BlockWriter()
    blocks.close()
    assert blocks.take_events() == []


def test_blocks_of_the_prompt_are_discarded_except_for_an_open_call() -> None:
    blocks = BlockWriter()
    blocks.write("text", "of the prompt")
    blocks.discard_prompt()
    blocks.write("text", "a")
    assert blocks.take_events() == [BlockStart(0, "text"), BlockDelta(0, "a")]

    blocks = BlockWriter()
    blocks.write("text", "of the prompt")
    blocks.start_call("c", "f", None, False)
    blocks.add('{"a"')
    blocks.discard_prompt()
    assert blocks.take_events() == [BlockStart(0, "tool_call", "c", "f"), BlockDelta(0, '{"a"')]


# --- stop strings -----------------------------------------------------------------------------------------------------


def _find_stop(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    finder, shown = StopStrings(stops), ""
    for chunk in chunks:
        text, found = finder.feed(chunk)
        shown += text
        if found is not None:
            return shown, found
    return shown + finder.flush(), None


def test_a_stop_string_is_found_across_chunks_and_not_shown() -> None:
    assert _find_stop(["\n\n"], ["a\n", "\nb"]) == ("a", "\n\n")
    assert _find_stop(["END"], ["E", "N", "d"]) == ("ENd", None)
    assert _find_stop([""], ["abc"]) == ("abc", None)


def test_the_first_complete_stop_string_wins_and_the_longer_of_two_that_end_together() -> None:
    assert _find_stop(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert _find_stop(["c", "bc"], ["abc"]) == ("a", "bc")


def test_only_the_shortest_possible_suffix_is_held_back() -> None:
    finder = StopStrings(["aab"])
    assert finder.feed("xaaa") == ("xa", None)
    assert finder.held == "aa"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=5), max_size=6))
def test_the_chunks_do_not_change_where_a_stop_string_is_found(stops: list[str], chunks: list[str]) -> None:
    text = "".join(chunks)
    assert _find_stop(stops, chunks) == _find_stop(stops, [text]) == _find_stop(stops, list(text))


def test_a_long_stop_string_takes_memory_in_proportion_to_its_length() -> None:
    tracemalloc.start()
    finder = StopStrings(["x" * 40_000])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40_000_000  # all its prefixes would be 800 MB
    assert finder.feed("x" * 39_999) == ("", None)
    assert finder.feed("y") == ("x" * 39_999 + "y", None)


# --- log probabilities ------------------------------------------------------------------------------------------------


def _tracker() -> LogprobTracker:
    tracker = LogprobTracker(lambda i: (chr(i), bytes([i])))
    for end, token in ((1, 97), (2, 98), (3, 99)):
        tracker.add(end, IdLogprob(token, -1.0))
    return tracker


def test_a_token_is_returned_with_the_text_in_which_it_ends() -> None:
    tracker = _tracker()
    tracker.show(0, 2, seen=10)
    assert [t.token for t in tracker.take(11)] == ["a"]
    assert [t.token for t in tracker.take(12)] == ["b"]


def test_tokens_without_visible_text_are_skipped() -> None:
    tracker = _tracker()
    tracker.skip_to(2)
    tracker.show(2, 3, seen=0)
    assert [t.token for t in tracker.take(1)] == ["c"]


ADD = Tool("add", parameters={"properties": {"a": {}, "b": {}}, "required": ["a"]})


def test_a_tool_is_found_by_every_name_a_model_may_use() -> None:
    read, now, cloud = (Tool("read", namespace="fs"), Tool("now"), Tool("web", kind="server"))
    assert tools_by_name([read, now, cloud]) == {"read": read, "fs.read": read, "fs__read": read, "now": now}


def test_the_first_of_two_tools_with_the_same_name_wins() -> None:
    one, two = Tool("read", namespace="a"), Tool("read", namespace="b")
    found = tools_by_name([one, two])
    assert (found["read"], found["b.read"]) == (one, two)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "x"}', "x"),
        ('"just text"', "just text"),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
    ],
)
def test_the_input_of_a_custom_tool_is_the_only_string_inside(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin', "*** Begin"),
        ('{"input": "a\\n b\\', "a\n b"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"inp', ""),
        ("", ""),
        ('"abc', "abc"),
        ('{"input": "done"', "done"),
    ],
)
def test_the_input_of_a_custom_tool_that_is_cut_is_its_beginning(arguments: str, text: str) -> None:
    assert cut_input(arguments) == text


def test_every_cut_of_a_custom_tools_input_is_a_beginning_of_it() -> None:
    text = 'say "hi"\n\\ \u00e9 \U0001f600 end'
    whole = json.dumps({"input": text})
    assert all(text.startswith(cut_input(whole[:end])) for end in range(len(whole)))


@pytest.mark.parametrize(
    ("arguments", "is_accepted"),
    [
        ({"a": 1}, True),
        ({"a": 1, "b": 2}, True),
        ({"b": 2}, False),
        ({"a": 1, "c": 3}, False),
        ([1], False),
        ({}, False),
    ],
)
def test_a_tool_accepts_arguments_if_it_knows_all_and_none_is_missing(arguments: object, is_accepted: bool) -> None:
    assert accepts(ADD, arguments) is is_accepted
