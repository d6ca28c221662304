"""A lane's decisions, as tables of who runs and who waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from modelyard.core.errors import Overloaded
from modelyard.scheduler.lane import Lane


@dataclass(eq=False)
class Someone:
    name: str
    weight: int = 1
    tokens: int = 10

    def __repr__(self) -> str:
        return self.name


def lane_of(places: int, *, max_waiting: int = 8, max_tokens: int | None = None) -> Lane[Someone]:
    return Lane(places, max_waiting, max_tokens)


def test_a_free_place_is_taken_at_once():
    lane = lane_of(2)
    assert lane.take(Someone("a"))
    assert lane.take(Someone("b"))
    assert not lane.take(Someone("c"))


def test_nobody_overtakes_a_waiter_even_when_a_place_is_free():
    lane = lane_of(3)
    lane.take(Someone("a"))
    lane.join(Someone("heavy", weight=3))
    assert not lane.take(Someone("light"))


def test_waiters_are_admitted_in_order_when_places_come_back():
    lane = lane_of(1)
    lane.take(Someone("a"))
    b, c = Someone("b"), Someone("c")
    assert [lane.join(b), lane.join(c)] == [1, 2]
    lane.release(1)
    assert list(lane.admit()) == [b]
    lane.release(1)
    assert list(lane.admit()) == [c]
    assert lane.free == 0


def test_a_heavy_head_waits_for_all_its_places_and_is_not_starved():
    lane = lane_of(2)
    lane.take(Someone("a"))
    lane.take(Someone("b"))
    heavy, light = Someone("heavy", weight=2), Someone("light")
    lane.join(heavy)
    lane.join(light)
    lane.release(1)
    assert list(lane.admit()) == []
    lane.release(1)
    assert list(lane.admit()) == [heavy]


def test_a_full_queue_refuses_and_says_how_long_it_is():
    lane = lane_of(1, max_waiting=2)
    lane.take(Someone("a"))
    lane.join(Someone("b"))
    lane.join(Someone("c"))
    with pytest.raises(Overloaded) as refused:
        lane.join(Someone("d"))
    assert refused.value.position == 3
    assert refused.value.retry_after >= 1


def test_the_queue_is_bounded_by_prompt_tokens_too():
    lane = lane_of(1, max_tokens=100)
    lane.take(Someone("a"))
    lane.join(Someone("b", tokens=90))
    with pytest.raises(Overloaded, match="90 prompt tokens"):
        lane.join(Someone("c", tokens=20))
    lane.join(Someone("d", tokens=10))


def test_a_waiter_that_leaves_gives_its_tokens_back():
    lane = lane_of(1, max_tokens=100)
    lane.take(Someone("a"))
    b = Someone("b", tokens=100)
    lane.join(b)
    lane.leave(b)
    assert lane.waiting_tokens == 0
    lane.join(Someone("c", tokens=100))
    assert repr(lane) == "<Lane 1/1 running, 1 waiting>"
