from __future__ import annotations

import re

import pytest

from modelyard.core.output_format import OutputFormat, Region
from modelyard.scanner.lexer import Steps, Tape, Unreadable, alphabet

FORM = OutputFormat(name="x", regions={"text": Region("text", {})}, hidden=("<a>", "<a>>", "[b]"))


def _drive(steps: Steps[object], tape: Tape, *chunks: str) -> object:
    """Feed the tape one chunk whenever the reader wants more, then end it."""
    waiting = iter(chunks)
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value
        chunk = next(waiting, None)
        tape.ended = chunk is None
        tape.push(chunk or "")


def test_only_the_suffix_that_may_become_a_marker_is_held() -> None:
    letters, tape = alphabet(FORM, frozenset()), Tape({})
    tape.push("x < y <a")
    assert letters.find(tape) is None
    assert tape.text[letters.hold(tape) :] == "<a"


def test_a_marker_waits_for_the_longer_one_that_begins_with_it() -> None:
    letters, tape = alphabet(FORM, frozenset()), Tape({})
    tape.push("<a>")
    assert letters.find(tape) is None
    tape.push(">")
    found = letters.find(tape)
    assert found
    assert found.group() == "<a>>"


def test_a_special_marker_is_one_code_that_no_text_spells() -> None:
    letters = alphabet(FORM, frozenset({"<a>"}))
    assert len(letters.codes["<a>"]) == 1
    assert letters.codes["[b]"] == "[b]"
    tape = Tape(letters.codes)
    tape.push("<a>!")
    assert letters.find(tape) is None
    assert letters.encode("x<a>y") == f"x{letters.codes['<a>']}y"


def test_clean_text_holds_no_marker_in_either_spelling() -> None:
    letters = alphabet(FORM, frozenset({"<a>"}))
    assert letters.clean(f"1<a>2{letters.codes['<a>']}3[b]4") == "1234"


def test_alphabets_are_made_once() -> None:
    assert alphabet(FORM, frozenset()) is alphabet(FORM, frozenset())


def test_a_reader_waits_for_text_that_may_still_come() -> None:
    tape = Tape({})
    assert _drive(tape.stands(("abc", "x")), tape, "a", "b", "cd") == "abc"
    assert _drive(tape.stands(("zz",)), tape) is None


def test_white_space_is_taken_across_chunks() -> None:
    tape = Tape({})
    assert _drive(tape.space(), tape, " ", "\n", " x") == " \n "
    assert _drive(tape.peek(), tape) == "x"


def test_what_was_taken_is_kept_while_it_may_be_given_back() -> None:
    tape = Tape({})
    tape.kept = []
    _drive(tape.until(re.compile(">"), 10), tape, "ab", "c>")
    assert "".join(tape.kept) == "abc"


def test_too_long_and_endless_names_are_unreadable() -> None:
    for chunks in (["x" * 20], ["x"]):
        tape = Tape({})
        with pytest.raises(Unreadable):
            _drive(tape.until(re.compile(">"), 10), tape, *chunks)
