"""The remembered prefixes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.engines.fake.memory import Match, Sequences, common_prefix


def test_first_prompt_finds_nothing() -> None:
    key, match = Sequences(2).take([1, 2, 3], None)
    assert key
    assert match == Match(0, None, False)


def test_same_prompt_leaves_one_token_to_evaluate() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 3])
    assert held.take([1, 2, 3], "a") == ("a", Match(2, None, False))


def test_session_goes_on_in_its_own_sequence() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 9, 9])
    held.keep("b", [1, 2, 3, 4])
    assert held.take([1, 2, 3, 4, 5], "a") == ("a", Match(2, 2, False))


def test_new_session_may_go_on_where_another_stood() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 3])
    assert held.take([1, 2, 3, 4], "b") == ("b", Match(3, 3, False))


def test_short_common_beginning_does_not_cost_another_conversation_its_place() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 3, 4, 5, 6])
    assert held.take([1, 2, 9], None)[1] == Match(0, None, False)
    assert held.count == 1


def test_least_recently_used_sequence_is_evicted() -> None:
    held = Sequences(2)
    held.keep("a", [1, 1])
    held.keep("b", [2, 2])
    key, match = held.take([3, 3], "c")
    assert match.evicted
    held.keep(key, [3, 3])
    assert held.count == 2
    assert held.tokens == 4
    assert held.take([1, 1], "a")[1].cached == 0


def test_copy_is_independent() -> None:
    held = Sequences(1)
    held.keep("a", [1])
    twin = held.copy()
    held.clear()
    assert (held.count, twin.count) == (0, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3000), st.lists(st.integers(0, 1), max_size=4), st.lists(st.integers(0, 1), max_size=4))
def test_common_prefix_equals_the_plain_definition(shared: int, a: list[int], b: list[int]) -> None:
    left, right = [7] * shared + a, [7] * shared + b
    plain = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    assert common_prefix(left, right) == plain
