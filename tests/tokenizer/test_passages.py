"""A text in passages reads as the whole does, and what was read once is not read again."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.tokenizer.passages import Passages, Uncut

TEXTS = st.lists(
    st.sampled_from(["Lamp", "7", ". ", ", ", ".", ",", " ", "\n", ".  ", ", . ", "It", "\x1c"]), max_size=12
).map("".join)


class Letters:
    """Reads letter by letter, so that it does not matter where a text is cut; and keeps what it was given."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int] | None:
        self.asked.append(text)
        return None if "?" in text else list(map(ord, text))


def both() -> tuple[Passages, Passages, Letters]:
    letters = Letters()
    clauses = Passages(", ", letters)
    return Passages(". ", clauses.encode, clauses), clauses, letters


SHARED, _, _ = both()


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_passages_together_are_the_text(text: str) -> None:
    try:
        found = SHARED.encode(text)
    except Uncut:
        assert any(not passage[:1].strip() for passage in re.split("[.,] ", text)[1:])
    else:
        assert found == list(map(ord, text))


def test_only_the_clause_that_is_new_is_read() -> None:
    sentences, _, letters = both()
    sentences.encode("Hello. My order 17 came, and it is dark. What now, please")
    letters.asked.clear()
    sentences.encode("Hello. My order 18 came, and it is dark. What now, please")
    assert letters.asked == [" My order 18 came,"]


def test_a_sentence_is_remembered_when_nothing_in_it_is_new() -> None:
    letters, cut = Letters(), Letters()
    clauses = Passages(", ", letters)
    sentences = Passages(". ", lambda text: cut(text) and clauses.encode(text), clauses)
    for wanted in (["One, two.", " Three, four"], ["One, two.", " Three, four"], []):
        cut.asked.clear()
        sentences.encode("One, two. Three, four")
        assert cut.asked == wanted
    assert letters.asked == ["One,", " two.", " Three,", " four"]


def test_what_was_learned_is_counted_once() -> None:
    sentences, clauses, _ = both()
    sentences.encode("One, two. Three")
    assert clauses.learned == 2  # "Three" has no clause to be cut into
    sentences.encode("One, two. Three")
    assert clauses.learned == 2


@pytest.mark.parametrize("text", ["What?. Then", "Then. What? is", "Then, what? , is"])
def test_what_cannot_be_read_is_not_cut_and_not_counted(text: str) -> None:
    sentences, clauses, _ = both()
    with pytest.raises(Uncut):
        sentences.encode(text)
    known = clauses.learned
    with pytest.raises(Uncut):
        sentences.encode(text)
    assert clauses.learned == known


def test_nobody_can_change_what_is_remembered() -> None:
    sentences, _, _ = both()
    for _ in range(3):
        found = sentences.encode("One. Two")
        assert found == list(map(ord, "One. Two"))
        found.clear()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.tokenizer.passages._MAX_HELD", 1_000)
    _, clauses, _ = both()
    for number in range(1_000):
        clauses.encode(f"First {number}, inner {number}, last {number}")
    held = [key for memory in (clauses._first, clauses._inner, clauses._last) for key in memory]
    assert 0 < sum(map(len, held)) < 1_100
