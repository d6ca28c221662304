"""The input buffer and the markers in it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from modelyard.core.events import BlockDelta
from modelyard.core.output_format import OutputFormat, Region
from modelyard.core.tokenizer import IdLogprob, Piece
from modelyard.scanner import Scanner, parse
from modelyard.scanner.formats import load, names
from modelyard.scanner.lexer import (
    Incremental,
    MarkerFilter,
    MarkerSpellings,
    ParseError,
    TextBuffer,
    marker_table,
    remove_markers,
)
from tests.scanner.helpers import ScannedBlock, marker_tokens, scan, text_of

FORM = OutputFormat(name="x", regions={"text": Region("text", {})}, hidden_markers=("<a>", "<a>>", "[b]"))


def _drive(steps: Incremental[object], buffer: TextBuffer, *chunks: str) -> object:
    """Feed one chunk whenever the reader needs more input, then end the input."""
    waiting = iter(chunks)
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value
        chunk = next(waiting, None)
        buffer.ended = chunk is None
        buffer.push(chunk or "")


def test_only_the_suffix_that_may_become_a_marker_is_held_back() -> None:
    table, buffer = marker_table(FORM, frozenset()), TextBuffer({})
    buffer.push("x < y <a")
    assert table.find(buffer) is None
    assert buffer.text[table.partial_start(buffer) :] == "<a"


def test_a_marker_waits_for_a_longer_one_with_the_same_beginning() -> None:
    table, buffer = marker_table(FORM, frozenset()), TextBuffer({})
    buffer.push("<a>")
    assert table.find(buffer) is None
    buffer.push(">")
    found = table.find(buffer)
    assert found
    assert found.group() == "<a>>"


def test_a_special_token_is_one_code_that_no_text_contains() -> None:
    table = marker_table(FORM, frozenset({"<a>"}))
    assert len(table.codes["<a>"]) == 1
    assert table.codes["[b]"] == "[b]"
    buffer = TextBuffer(table.codes)
    buffer.push("<a>!")
    assert table.find(buffer) is None
    assert table.encode("x<a>y") == f"x{table.codes['<a>']}y"


def test_markers_are_removed_in_both_spellings() -> None:
    table = marker_table(FORM, frozenset({"<a>"}))
    assert table.remove_markers(f"1<a>2{table.codes['<a>']}3[b]4") == "1234"


def test_a_marker_table_is_built_once() -> None:
    assert marker_table(FORM, frozenset()) is marker_table(FORM, frozenset())


def test_a_match_waits_for_more_input() -> None:
    buffer = TextBuffer({})
    assert _drive(buffer.match(("abc", "x")), buffer, "a", "b", "cd") == "abc"
    assert _drive(buffer.match(("zz",)), buffer) is None


def test_white_space_is_skipped_across_chunks() -> None:
    buffer = TextBuffer({})
    assert _drive(buffer.skip_space(), buffer, " ", "\n", " x") == " \n "
    assert _drive(buffer.peek(), buffer) == "x"


def test_taken_text_stays_uncommitted_until_the_commit() -> None:
    buffer = TextBuffer({})
    buffer.commit()
    _drive(buffer.read_until(re.compile(">"), 10), buffer, "ab", "c>")
    assert "".join(buffer.uncommitted or ()) == "abc"
    buffer.commit()
    assert buffer.uncommitted == []


def test_names_that_are_too_long_or_never_end_are_errors() -> None:
    for chunks in (["x" * 20], ["x"]):
        buffer = TextBuffer({})
        with pytest.raises(ParseError):
            _drive(buffer.read_until(re.compile(">"), 10), buffer, *chunks)


def _read_verbatim(chunks: list[str], *ends: str) -> tuple[list[str], str, str]:
    """What is emitted after each chunk, the end that was found, and the rest of the input."""
    buffer, emitted = TextBuffer({}), [""]

    def emit(text: str) -> None:
        emitted[-1] += text

    steps = buffer.read_verbatim(ends, emit)
    for chunk in chunks:
        buffer.push(chunk)
        try:
            next(steps)
        except StopIteration as over:
            return emitted, over.value, buffer.text[buffer.pos :]
        emitted.append("")
    buffer.ended = True
    with pytest.raises(StopIteration) as over:
        next(steps)
    return emitted, over.value.value, buffer.text[buffer.pos :]


@pytest.mark.parametrize(
    ("chunks", "ends", "emitted", "end", "rest"),
    [
        (["a\n b</x>c"], ("</x>",), ["a\n b"], "</x>", "</x>c"),
        (["a <", "/y> </", "x>"], ("</x>",), ["a ", "</y> ", ""], "</x>", "</x>"),
        (["a|b;c"], (";", "|"), ["a"], "|", "|b;c"),
        (["ab</"], ("</x>",), ["ab", "</"], "", ""),
    ],
)
def test_verbatim_text_is_emitted_as_soon_as_it_cannot_be_part_of_the_end(
    chunks: list[str], ends: tuple[str, ...], emitted: list[str], end: str, rest: str
) -> None:
    assert _read_verbatim(chunks, *ends) == (emitted, end, rest)


TEXT = MarkerSpellings(["<ab>", "[x]"], [])
TOKENS = MarkerSpellings([], ["<ab>", "[x]"])


def _run(spellings: MarkerSpellings, *parts: str | None) -> list[str]:
    """What is shown after each part; None is a gap."""
    marker_filter, shown = MarkerFilter(spellings), []
    for part in parts:
        if part is None:
            marker_filter.mark_gap()
        shown.append(marker_filter.feed(part or ""))
    return [*shown, marker_filter.flush()]


def test_both_halves_are_removed_if_the_first_is_held_back() -> None:
    assert _run(TEXT, "1 <a", None, "b> 2") == ["1 ", "", " 2", ""]


def test_halves_that_do_not_join_are_shown_as_soon_as_possible() -> None:
    assert _run(TEXT, "1 <a", None, "b", " 2") == ["1 ", "", "", "<ab 2", ""]


def test_only_the_rest_of_a_marker_is_removed_if_its_first_half_was_shown() -> None:
    marker_filter = MarkerFilter(TEXT)
    assert marker_filter.feed("1 <a") + marker_filter.flush() == "1 <a"
    marker_filter.mark_gap()
    assert marker_filter.feed("b") == ""
    assert marker_filter.feed("> 2") == " 2"


def test_nested_markers_are_removed_from_the_inside_out() -> None:
    assert _run(TEXT, "1 [", None, "x", None, "] 2") == ["1 ", "", "", "", " 2", ""]
    assert _run(TEXT, "1 <[", None, "x", None, "]", "ab> 2") == ["1 <", "", "", "", "", " 2", ""]


def test_a_removed_marker_may_leave_another_one() -> None:
    assert "".join(_run(TEXT, "1 <", None, "a<ab", None, ">b> 2")) == "1 <a 2"


def test_halves_that_were_shown_complete_no_marker() -> None:
    assert "".join(_run(TEXT, "<a<a", None, "b>", "b>", "b>!")) == "<a!"


def test_a_quoted_token_is_shown_at_once() -> None:
    assert _run(TOKENS, "1 <a", "b> 2") == ["1 <a", "b> 2", ""]


def test_text_around_a_gap_does_not_join_to_a_token() -> None:
    assert _run(TOKENS, "1 <a", None, "b", "> 2") == ["1 <a", "", "", " 2", ""]


def test_a_quotation_after_a_gap_is_shown() -> None:
    assert "".join(_run(TOKENS, "1 <a", None, "<ab> 2")) == "1 <a<ab> 2"


def test_text_without_the_beginning_of_a_marker_leaves_the_filter_idle() -> None:
    marker_filter = MarkerFilter(TEXT)
    marker_filter.feed("a > b")
    assert marker_filter.is_idle
    marker_filter.feed("<")
    assert (marker_filter.is_idle, marker_filter.held) == (False, 1)


def test_deep_nesting_holds_back_no_more_than_a_marker() -> None:
    marker_filter = MarkerFilter(TEXT)
    for part in ("<a" * 5000, "b>" * 5000):
        marker_filter.feed(part)
        marker_filter.mark_gap()
        assert marker_filter.held < 4


def test_nested_markers_are_removed_from_a_complete_text() -> None:
    pattern = re.compile(r"<ab>|\[x\]")
    deep = "<a" * 2000 + "[x]" + "b>" * 2000
    assert remove_markers(f"1{deep}2<a>3", pattern, ["<ab>", "[x]"]) == "12<a>3"
    assert remove_markers("as it is <a", pattern, ["<ab>", "[x]"]) == "as it is <a"


# --- in every format --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", names())
def test_markers_and_tokens_do_not_join_around_another_one(format: str) -> None:
    """Every marker around every other one, cut in the middle."""
    form = load(format)
    for outer in form.markers:
        head, tail = outer[: len(outer) // 2], outer[len(outer) // 2 :]
        for inner in form.markers:
            parsed = parse([f"a {head}{inner}{tail} b"], format=form)
            assert not [m for m in form.markers if m in parsed.content or m in parsed.reasoning], (outer, inner)
    specials = marker_tokens(form)
    for outer, inner in pairwise([*specials, *specials]):
        given = [Piece("a " + outer[:2]), Piece(inner, special=True), Piece(outer[2:] + " b")]
        blocks = scan(given, form, specials=specials)
        assert outer not in text_of(blocks), (outer, inner)
        assert outer not in text_of(blocks, "thinking"), (outer, inner)


def test_a_joined_marker_has_no_effect() -> None:
    assert scan(["a </tool_<|im_end|>call> b <thi<|im_end|>nk> c"], "hermes") == [ScannedBlock("text", "a  b  c")]


def test_halves_in_two_blocks_do_not_join() -> None:
    raw = "a <|inner_<|inner_prefix|>hm<|inner_suffix|>prefix|> b"
    assert text_of(scan([raw], "apertus")) == "a <|inner_ b"


def test_halves_on_both_sides_of_a_call_do_not_join() -> None:
    raw = 'a <tool_<tool_call>{"name": "now", "arguments": {}}</tool_call>call> b'
    assert text_of(scan([raw], "hermes")) == "a <tool_ b"


def test_reasoning_and_text_do_not_join() -> None:
    assert scan(["<think>a <tool_</think>call> b"], "hermes") == [
        ScannedBlock("thinking", "a <tool_"),
        ScannedBlock("text", "call> b"),
    ]


def test_an_unknown_special_token_does_not_join_its_neighbours() -> None:
    given = [Piece("<tool_"), Piece("<|pad|>", special=True), Piece("call> b")]
    assert scan(given, "hermes", specials=["<tool_call>", "<|pad|>"]) == [ScannedBlock("text", "<tool_ b")]


def test_stop_strings_are_searched_in_the_filtered_text() -> None:
    raw = "a </tool_<|im_end|>call>b"
    assert text_of(scan([raw], "hermes", stop=["call"])) == "a b"
    assert text_of(scan([raw], "hermes", stop=["a b"])) == ""


def test_a_stop_string_that_was_held_back_before_a_call_ends_the_output() -> None:
    raw = 'a <tool_<|im_end|><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for chunks in ([raw], list(raw)):
        assert scan(chunks, "hermes", stop=["<tool_"]) == [ScannedBlock("text", "a ")]


def test_a_name_with_a_marker_is_not_a_name() -> None:
    parsed = parse(['<tool_call>{"name": "f</think>", "arguments": {}}</tool_call>'], format="hermes")
    assert (parsed.tool_calls, parsed.content) == ((), '{"name": "f", "arguments": {}}')


def test_a_marker_that_the_prompt_began_counts() -> None:
    prefill = "<|im_start|>assistant\nSo. <tool_"
    blocks = scan(list('call>{"name": "now", "arguments": {}}</tool_call>'), "hermes", prefill=prefill)
    assert blocks == [ScannedBlock("tool_call", "{}", "now")]
    assert scan(list("box."), "hermes", prefill=prefill) == [ScannedBlock("text", "box.")]
    assert scan(["<|im_end|>call> b"], "hermes", prefill=prefill) == [ScannedBlock("text", " b")]


def test_log_probabilities_of_a_joined_marker_are_not_shown() -> None:
    scanner = Scanner(load("hermes"), new_id=lambda: "c", token_text=lambda i: (f"t{i}", b""))
    words = ["a", " <tool_", "<|im_end|>", "call>", "b", " <tool_", "<|im_end|>", "c"]
    made = [Piece(word, logprob=IdLogprob(i, -1.0)) for i, word in enumerate(words)]
    events = [e for piece in made for e in scanner.feed([piece])] + scanner.finish()
    shown = [(e.text, [p.token for p in e.logprobs]) for e in events if isinstance(e, BlockDelta)]
    assert shown == [("a", ["t0"]), (" ", []), ("b", ["t4"]), (" ", []), ("<tool_c", ["t5", "t7"])]
