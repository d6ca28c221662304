"""Guesses from a text's own past: against a plain search, in any pieces it may come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.llama_cpp import speculation
from modelyard.engines.llama_cpp.speculation import NgramIndex

TEXTS = st.lists(st.integers(0, 2), max_size=120)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        pytest.param([], 4, [], id="nothing said"),
        pytest.param([1, 2, 3], 4, [], id="nothing before it"),
        pytest.param([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5], id="what followed then"),
        pytest.param([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5], id="the last time counts"),
        pytest.param([7, 7, 7, 7], 3, [7, 7, 7], id="a run goes on"),
        pytest.param([1, 2, 3, 4, 1, 2, 3], 6, [4, 1, 2, 3, 4, 1], id="a text that repeats itself goes on"),
        pytest.param([1, 2, 3, 4, 2, 3], 2, [], id="two alike are not enough"),
        pytest.param([2_000_000, 1, 2, 5, 2_000_000, 1, 2], 1, [5], id="large ids"),
    ],
)
def test_guess(text: list[int], count: int, expected: list[int]) -> None:
    assert NgramIndex(text).guess(count) == expected


def searched(text: list[int], count: int) -> list[int]:
    """The same, the slow way."""
    places = [at for at in range(3, len(text)) if text[at - 3 : at] == text[-3:]]
    if not places:
        return []
    grown = list(text)
    for at in range(places[-1], places[-1] + count):
        grown.append(grown[at])
    return grown[len(text) :]


@given(TEXTS, st.integers(1, 9))
def test_guess_is_what_a_search_finds(text: list[int], count: int) -> None:
    assert NgramIndex(text).guess(count) == searched(text, count)


@given(st.lists(TEXTS, max_size=6), st.integers(1, 9))
def test_text_that_comes_in_pieces_is_one_text(pieces: list[list[int]], count: int) -> None:
    grown, whole = NgramIndex(), []
    for piece in pieces:
        grown.extend(piece)
        whole += piece
        assert len(grown) == len(whole)
        assert grown.guess(count) == searched(whole, count)


def test_long_text_is_taken_in_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_BITE", 40)
    text = NgramIndex([*range(97), 1, 2, 3])
    assert [text.guess(1) for _ in range(3)] == [[], [], [4]]
