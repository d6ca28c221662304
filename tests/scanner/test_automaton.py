"""The automaton finds what a search for every text finds, and its size does not grow faster than the texts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.scanner.automaton import Automaton

_TEXTS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=200, deadline=None)
@given(_TEXTS, st.text("abc", max_size=12))
def test_a_state_knows_the_longest_text_that_ends_there(texts: list[str], text: str) -> None:
    automaton, state = Automaton(texts), 0
    for end, char in enumerate(text, 1):
        state = automaton.step(state, char)
        ending = [one for one in texts if text[:end].endswith(one)]
        assert automaton.found[state] == max(ending, key=len, default=None)


@settings(max_examples=200, deadline=None)
@given(_TEXTS, st.text("abc", max_size=12))
def test_the_longest_suffix_that_begins_a_text_is_found(texts: list[str], text: str) -> None:
    begun = [length for one in texts for length in range(1, len(one)) if text.endswith(one[:length])]
    assert Automaton(texts).begun(text) == max(begun, default=0)


def test_the_number_of_states_grows_with_the_length_and_not_with_its_square() -> None:
    assert len(Automaton(["ab" * 20_000]).next) == 40_001
