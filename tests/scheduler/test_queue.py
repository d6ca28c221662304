"""A lane's decisions: who is next, who is turned away, and what somebody is told of his position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from modelyard.core.errors import Overloaded
from modelyard.scheduler.queue import RequestQueue


@dataclass(eq=False)
class Someone:
    name: str
    key: str = ""
    priority: Any = "main"
    since: float = 0.0
    weight: int = 1
    tokens: int = 10

    def __repr__(self) -> str:
        return self.name


def lane_of(*waiters: Someone, max_waiting: int = 1000, max_tokens: int | None = None) -> RequestQueue[Someone]:
    lane: RequestQueue[Someone] = RequestQueue(max_waiting, max_tokens)
    for waiter in waiters:
        lane.add(waiter)
    return lane


def order(lane: RequestQueue[Someone]) -> list[str]:
    return [lane.pop().name for _ in range(lane.waiting)]


def many(names: str, **more: Any) -> list[Someone]:
    return [Someone(name, **more) for name in names.split()]


def test_the_first_to_come_is_the_first_to_go():
    assert order(lane_of(*many("a b c"))) == ["a", "b", "c"]


def test_keys_take_turns_and_each_keeps_its_own_order():
    lane = lane_of(*many("a1 a2 a3 a4", key="a"), *many("b1 b2", key="b"), *many("c1", key="c"))
    assert order(lane) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_key_that_comes_back_stands_behind_those_who_wait():
    lane = lane_of(*many("a1", key="a"), *many("b1 b2", key="b"))
    assert lane.pop().name == "a1"
    lane.add(Someone("a2", key="a"))
    assert order(lane) == ["b1", "a2", "b2"]


def test_background_goes_after_main():
    lane = lane_of(*many("x y", priority="background"), *many("a b"))
    assert order(lane) == ["a", "b", "x", "y"]


def test_background_is_let_through_after_eight_main_ones():
    lane = lane_of(*many("x y", priority="background"), *many(" ".join(f"m{i}" for i in range(20))))
    got = order(lane)
    assert (got.index("x"), got.index("y")) == (8, 17)


def test_the_head_is_the_one_that_is_taken_next():
    lane = lane_of(*many("a1 a2", key="a"), *many("b1", key="b"), *many("x", priority="background"))
    while (head := lane.head()) is not None:
        assert lane.pop() is head


def test_a_heavy_head_is_not_overtaken():
    heavy = Someone("heavy", weight=4)
    lane = lane_of(heavy, *many("light"))
    assert lane.head() is heavy


def test_a_full_queue_refuses_and_says_how_long_it_is():
    lane = lane_of(*many("a b"), max_waiting=2)
    with pytest.raises(Overloaded) as refused:
        lane.add(Someone("c"))
    assert refused.value.position == 3
    assert refused.value.retry_after == 2.0


@pytest.mark.parametrize(
    ("served", "places", "retry"),
    [
        ([], 1, 10.0),  # nothing known: a second a turn
        ([4.0], 1, 40.0),
        ([4.0], 5, 8.0),
        ([0.01], 1, 1.0),  # never less than a second
        ([1000.0], 1, 300.0),  # nor more than five minutes
        ([1.0, 2.0], 10, 1.2),  # a moving average
    ],
)
def test_when_to_come_back_follows_from_recent_service_times(served: list[float], places: int, retry: float):
    lane = lane_of(*many("a b c d e f g h i j"), max_waiting=10)
    for seconds in served:
        lane.record_service(seconds)
    with pytest.raises(Overloaded) as refused:
        lane.add(Someone("late"), places)
    assert refused.value.retry_after == pytest.approx(retry)


def test_the_queue_is_bounded_by_prompt_tokens_too():
    lane = lane_of(Someone("b", tokens=90), max_tokens=100)
    with pytest.raises(Overloaded, match="90 prompt tokens"):
        lane.add(Someone("c", tokens=20))
    lane.add(Someone("d", tokens=10))
    assert lane.waiting_tokens == 100


def test_a_waiter_that_leaves_gives_its_tokens_back():
    b = Someone("b", tokens=100)
    lane = lane_of(b, max_tokens=100)
    lane.remove(b)
    assert (lane.waiting, lane.waiting_tokens) == (0, 0)
    lane.add(Someone("c", tokens=100))
    assert repr(lane) == "<RequestQueue 1 waiting>"


def test_whoever_leaves_from_the_middle_changes_nothing_for_the_others():
    a, b, c = many("a b c")
    lane = lane_of(a, b, c)
    lane.remove(b)
    assert order(lane) == ["a", "c"]


def test_positions_are_the_order_in_which_they_will_go():
    waiters = [*many("a1 a2 a3", key="a"), *many("b1", key="b"), *many("c1 c2", key="c")]
    waiters += many("x1 x2", priority="background")
    lane = lane_of(*waiters)
    told = {waiter.name: lane.position(waiter) for waiter in waiters}
    assert sorted(told, key=told.__getitem__) == order(lane)
    assert sorted(told.values()) == list(range(1, 9))


def test_positions_move_up_when_somebody_goes():
    a, b, c = many("a b c")
    lane = lane_of(a, b, c)
    lane.pop()
    assert (lane.position(b), lane.position(c)) == (1, 2)


def test_the_longest_wait_is_found_behind_other_keys_and_priorities():
    lane = lane_of(
        Someone("a", key="a", since=5.0), Someone("b", key="b", since=3.0), Someone("x", priority="background", since=4)
    )
    assert lane.oldest() == 3.0
    assert lane_of().oldest() is None


def test_clearing_hands_everybody_out():
    lane = lane_of(*many("a b", key="k"), *many("x", priority="background"))
    assert {someone.name for someone in lane.clear()} == {"a", "b", "x"}
    assert (lane.waiting, lane.waiting_tokens, lane.head()) == (0, 0, None)
