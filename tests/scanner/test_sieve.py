"""Markers that come about only because another one was dropped."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from modelyard.core.engine import IdLogprob, Piece
from modelyard.core.events import BlockDelta
from modelyard.scanner import Scanner, parse
from modelyard.scanner.formats import load, names
from modelyard.scanner.sieve import Sieve, Spellings, purge
from tests.scanner.reading import Heard, scan, text_of, tokens

TEXT = Spellings(["<ab>", "[x]"], [])
TOKENS = Spellings([], ["<ab>", "[x]"])


def _run(of: Spellings, *parts: str | None) -> list[str]:
    """What is shown after each part; None is a seam."""
    sieve, told = Sieve(of), []
    for part in parts:
        if part is None:
            sieve.seam()
        told.append(sieve.feed(part or ""))
    return [*told, sieve.flush()]


def test_both_halves_go_where_the_first_still_waits() -> None:
    assert _run(TEXT, "1 <a", None, "b> 2") == ["1 ", "", " 2", ""]


def test_halves_that_join_to_nothing_are_shown_as_soon_as_that_is_known() -> None:
    assert _run(TEXT, "1 <a", None, "b", " 2") == ["1 ", "", "", "<ab 2", ""]


def test_of_a_marker_whose_first_half_was_shown_the_rest_goes() -> None:
    sieve = Sieve(TEXT)
    assert sieve.feed("1 <a") + sieve.flush() == "1 <a"
    sieve.seam()
    assert sieve.feed("b") == ""
    assert sieve.feed("> 2") == " 2"


def test_markers_in_markers_go_from_the_inside_out() -> None:
    assert _run(TEXT, "1 [", None, "x", None, "] 2") == ["1 ", "", "", "", " 2", ""]
    assert _run(TEXT, "1 <[", None, "x", None, "]", "ab> 2") == ["1 <", "", "", "", "", " 2", ""]


def test_what_one_that_went_leaves_side_by_side_may_be_the_next() -> None:
    assert "".join(_run(TEXT, "1 <", None, "a<ab", None, ">b> 2")) == "1 <a 2"


def test_halves_that_were_shown_finish_no_marker_however_often() -> None:
    assert "".join(_run(TEXT, "<a<a", None, "b>", "b>", "b>!")) == "<a!"


def test_a_token_that_is_quoted_in_one_go_flows_at_once() -> None:
    assert _run(TOKENS, "1 <a", "b> 2") == ["1 <a", "b> 2", ""]


def test_a_token_is_not_spelled_by_text_from_both_sides_of_something_dropped() -> None:
    assert _run(TOKENS, "1 <a", None, "b", "> 2") == ["1 <a", "", "", " 2", ""]


def test_a_quotation_after_something_was_dropped_is_still_one() -> None:
    assert "".join(_run(TOKENS, "1 <a", None, "<ab> 2")) == "1 <a<ab> 2"


def test_text_that_no_marker_begins_leaves_the_sieve_idle() -> None:
    sieve = Sieve(TEXT)
    sieve.feed("a > b")
    assert sieve.is_idle
    sieve.feed("<")
    assert (sieve.is_idle, sieve.waiting) == (False, 1)


def test_nesting_without_end_waits_for_no_more_than_a_marker() -> None:
    sieve = Sieve(TEXT)
    for part in ("<a" * 5000, "b>" * 5000):
        sieve.feed(part)
        sieve.seam()
        assert sieve.waiting < 4


def test_a_purged_text_holds_no_marker_however_deep() -> None:
    pattern = re.compile(r"<ab>|\[x\]")
    deep = "<a" * 2000 + "[x]" + "b>" * 2000
    assert purge(f"1{deep}2<a>3", pattern, ["<ab>", "[x]"]) == "12<a>3"
    assert purge("as it is <a", pattern, ["<ab>", "[x]"]) == "as it is <a"


# --- in every format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", names())
def test_no_pair_of_markers_joins_to_one(format: str) -> None:
    """Every marker around every other one, cut in the middle."""
    form = load(format)
    for outer in form.markers:
        head, tail = outer[: len(outer) // 2], outer[len(outer) // 2 :]
        for inner in form.markers:
            parsed = parse([f"a {head}{inner}{tail} b"], format=form)
            assert not [m for m in form.markers if m in parsed.content or m in parsed.reasoning], (outer, inner)


@pytest.mark.parametrize("format", names())
def test_no_pair_of_tokens_joins_to_one(format: str) -> None:
    form = load(format)
    for outer, inner in pairwise([*tokens(form), *tokens(form)]):
        given = [Piece("a " + outer[:2]), Piece(inner, special=True), Piece(outer[2:] + " b")]
        blocks = scan(given, form, specials=tokens(form))
        assert outer not in text_of(blocks), (outer, inner)
        assert outer not in text_of(blocks, "thinking"), (outer, inner)


def test_a_joined_marker_has_no_effect() -> None:
    assert scan(["a </tool_<|im_end|>call> b <thi<|im_end|>nk> c"], "hermes") == [Heard("text", "a  b  c")]


def test_halves_in_two_blocks_do_not_join_either() -> None:
    raw = "a <|inner_<|inner_prefix|>hm<|inner_suffix|>prefix|> b"
    assert text_of(scan([raw], "apertus")) == "a <|inner_ b"


def test_halves_on_both_sides_of_a_call_do_not_join() -> None:
    raw = 'a <tool_<tool_call>{"name": "now", "arguments": {}}</tool_call>call> b'
    assert text_of(scan([raw], "hermes")) == "a <tool_ b"


def test_reasoning_and_text_are_not_joined_by_anybody() -> None:
    assert scan(["<think>a <tool_</think>call> b"], "hermes") == [
        Heard("thinking", "a <tool_"),
        Heard("text", "call> b"),
    ]


def test_a_control_token_of_nobody_joins_nothing() -> None:
    given = [Piece("<tool_"), Piece("<|pad|>", special=True), Piece("call> b")]
    assert scan(given, "hermes", specials=["<tool_call>", "<|pad|>"]) == [Heard("text", "<tool_ b")]


def test_stop_strings_are_looked_for_in_what_is_shown() -> None:
    raw = "a </tool_<|im_end|>call>b"
    assert text_of(scan([raw], "hermes", stop=["call"])) == "a b"
    assert text_of(scan([raw], "hermes", stop=["a b"])) == ""


def test_a_stop_string_that_waited_for_a_call_ends_everything_before_it() -> None:
    raw = 'a <tool_<|im_end|><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for chunks in ([raw], list(raw)):
        assert scan(chunks, "hermes", stop=["<tool_"]) == [Heard("text", "a ")]


def test_a_name_that_holds_a_marker_is_none() -> None:
    parsed = parse(['<tool_call>{"name": "f</think>", "arguments": {}}</tool_call>'], format="hermes")
    assert (parsed.tool_calls, parsed.content) == ((), '{"name": "f", "arguments": {}}')


def test_a_marker_that_the_prompt_began_is_one() -> None:
    prefill = "<|im_start|>assistant\nSo. <tool_"
    blocks = scan(list('call>{"name": "now", "arguments": {}}</tool_call>'), "hermes", prefill=prefill)
    assert blocks == [Heard("tool_call", "{}", "now")]
    assert scan(list("box."), "hermes", prefill=prefill) == [Heard("text", "box.")]
    assert scan(["<|im_end|>call> b"], "hermes", prefill=prefill) == [Heard("text", " b")]


def test_log_probabilities_of_a_joined_marker_are_not_shown() -> None:
    scanner = Scanner(load("hermes"), new_id=lambda: "c", spell=lambda i: (f"t{i}", b""))
    words = ["a", " <tool_", "<|im_end|>", "call>", "b", " <tool_", "<|im_end|>", "c"]
    made = [Piece(word, logprob=IdLogprob(i, -1.0)) for i, word in enumerate(words)]
    events = [e for piece in made for e in scanner.feed([piece])] + scanner.finish()
    told = [(e.text, [p.token for p in e.logprobs]) for e in events if isinstance(e, BlockDelta)]
    assert told == [("a", ["t0"]), (" ", []), ("b", ["t4"]), (" ", []), ("<tool_c", ["t5", "t7"])]
