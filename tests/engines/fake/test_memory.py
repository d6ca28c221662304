"""The remembered prefixes."""

from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Accepted
from modelyard.engines.fake.memory import Sequences, common_prefix


def test_first_prompt_finds_nothing() -> None:
    key, match = Sequences(2).take([1, 2, 3], None)
    assert key
    assert match == Accepted(0, None, False)


def test_same_prompt_leaves_one_token_to_evaluate() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 3])
    assert held.take([1, 2, 3], "a") == ("a", Accepted(2, None, False))


def test_session_goes_on_in_its_own_sequence() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 9, 9])
    held.keep("b", [1, 2, 3, 4])
    assert held.take([1, 2, 3, 4, 5], "a") == ("a", Accepted(2, 2, False))


def test_new_session_may_go_on_where_another_stood() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 3])
    assert held.take([1, 2, 3, 4], "b") == ("b", Accepted(3, 3, False))


def test_short_common_beginning_does_not_cost_another_conversation_its_place() -> None:
    held = Sequences(2)
    held.keep("a", [1, 2, 3, 4, 5, 6])
    assert held.take([1, 2, 9], None)[1] == Accepted(0, None, False)
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
    assert held.take([1, 1], "a")[1].cached_tokens == 0


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


def test_a_session_kept_twice_is_remembered_as_it_was_kept_last() -> None:
    held = Sequences(4)
    held.keep("a", [1, 1, 1, 1])
    held.keep("a", [2, 2, 2, 2])
    assert held.take([1, 1, 1, 1], None)[1] == Accepted()


def test_where_long_prompts_part_short_ones_may_still_be_one_conversation() -> None:
    held = Sequences(4)
    held.keep("long", [1, 1, 1, 7, 1, 1, 1, 1])
    assert held.take([1, 1, 1, 8], None)[1] == Accepted()
    held.keep("short", [1, 1, 1, 7, 1])
    assert held.take([1, 1, 1, 8], None) == ("short", Accepted(3, 3))


class Joined:
    """The plain definition: whole sequences in a list, the least recently used first, and every token compared."""

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.held: list[tuple[Hashable, list[int]]] = []

    def take(self, ids: list[int], session: str | None) -> tuple[Hashable, Accepted]:
        own = [one for one in self.held if one[0] == session]
        near = [one for one in self.held[:-3:-1] if agreed(one[1], ids) * 2 >= len(one[1])]
        found = own or sorted(near, key=lambda one: -agreed(one[1], ids))[:1]
        found = [(key, held) for key, held in found if own or agreed(held, ids)]
        if not found:
            evicted = len(self.held) >= self.parallel
            self.held = self.held[1:] if evicted else self.held
            return session or object(), Accepted(evicted=evicted)
        self.held.remove(found[0])
        key, held = found[0]
        shared = agreed(held, ids)
        return session or key, Accepted(
            max(0, min(shared, len(ids) - 1)), shared if held and shared < len(ids) else None
        )

    def keep(self, key: Hashable, ids: list[int]) -> None:
        self.held = [*(one for one in self.held if one[0] != key), (key, ids)][-self.parallel :]


def agreed(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


tokens = st.lists(st.integers(0, 1), max_size=6)
jobs = st.tuples(tokens, st.sampled_from([None, None, "a", "b"]), tokens, st.integers(0, 2))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.lists(jobs, max_size=25))
def test_jobs_that_overlap_find_what_the_plain_definition_finds(
    parallel: int, jobs: list[tuple[list[int], str | None, list[int], int]]
) -> None:
    fast, plain, running = Sequences(parallel), Joined(parallel), []
    for prompt, session, said, most in jobs:
        (key, found), (name, expected) = fast.take(prompt, session), plain.take(prompt, session)
        assert found == expected
        running.append((key, name, prompt, said))
        while len(running) > most:
            key, name, prompt, said = running.pop(0)
            fast.keep(key, prompt, said)
            plain.keep(name, prompt + said)
        assert (fast.count, fast.tokens) == (len(plain.held), sum(len(ids) for _, ids in plain.held))
