"""The input buffer and the markers in it."""

from __future__ import annotations

import re

import pytest

from modelyard.core.output_format import OutputFormat, Region
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer, marker_table

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
