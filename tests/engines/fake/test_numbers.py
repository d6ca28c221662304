"""Numbers out of a hash."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.engines.fake.numbers import logprob, unit_vector


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 4095), st.integers(0, 20))
def test_top_probabilities_are_a_distribution_led_by_the_chosen(token: int, alternatives: int) -> None:
    made = logprob(token, alternatives, 4096)
    assert len(made.top) == len({t for t, _ in made.top}) == alternatives
    assert sum(math.exp(p) for _, p in made.top) <= 1
    assert [p for _, p in made.top] == sorted((p for _, p in made.top), reverse=True)
    assert alternatives == 0 or made.top[0] == (token, made.logprob)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=20), st.integers(1, 100))
def test_vectors_have_length_one_and_never_change(ids: list[int], size: int) -> None:
    vector = unit_vector(ids, size)
    assert len(vector) == size
    assert math.isclose(sum(x * x for x in vector), 1)
    assert vector == unit_vector(ids, size)
