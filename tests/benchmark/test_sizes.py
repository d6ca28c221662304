"""Words for a wanted number of tokens: guessed, then learned."""

from __future__ import annotations

import pytest

from modelyard.benchmark.sizes import WordSizes
from modelyard.benchmark.workload import Ask


def ask(tokens: int) -> Ask:
    return Ask(" ".join(f"w{n}" for n in range(tokens * 2)), tokens, 1)


def test_before_anybody_has_counted_it_guesses() -> None:
    assert len(WordSizes().first(ask(90)).split()) == 60
    assert len(WordSizes().more(ask(90)).split()) == 60


@pytest.mark.parametrize("wanted", [40, 100, 2000])
@pytest.mark.parametrize("slope", [1.1, 1.5, 2.4])
@pytest.mark.parametrize("around", [0, 31])
def test_it_finds_the_wanted_length_whatever_the_tokenizer_and_the_template(
    wanted: int, slope: float, around: int
) -> None:
    sizes = WordSizes()
    for _ in range(12):
        text = sizes.first(ask(wanted))
        sizes.learn(text, round(around + slope * len(text.split())))
    found = around + slope * len(sizes.first(ask(wanted)).split())
    assert abs(found - wanted) <= 3 + 0.01 * wanted


def test_later_turns_are_measured_by_their_words() -> None:
    sizes = WordSizes()
    sizes.learn("a b c d", 8)
    assert len(sizes.more(ask(90)).split()) == 45


def test_a_server_that_does_not_count_teaches_nothing() -> None:
    sizes = WordSizes()
    sizes.learn("a b c d", 0)
    assert len(sizes.first(ask(90)).split()) == 60


def test_something_is_always_said() -> None:
    sizes = WordSizes()
    sizes.learn("a", 5000)
    assert sizes.first(ask(10)) == "w0"
