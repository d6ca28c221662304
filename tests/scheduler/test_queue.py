"""The order of a queue, its limits, and the positions in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from modelyard.core.errors import Overloaded
from modelyard.scheduler.queue import RequestQueue


@dataclass(eq=False)
class Waiter:
    name: str
    key: str = ""
    priority: Any = "main"
    since: float = 0.0
    weight: int = 1
    tokens: int = 10

    def __repr__(self) -> str:
        return self.name


def queue_of(*waiters: Waiter, max_waiting: int = 1000, max_tokens: int | None = None) -> RequestQueue[Waiter]:
    queue: RequestQueue[Waiter] = RequestQueue(max_waiting, max_tokens)
    for waiter in waiters:
        queue.add(waiter)
    return queue


def order(queue: RequestQueue[Waiter]) -> list[str]:
    return [pop(queue).name for _ in range(queue.waiting)]


def pop(queue: RequestQueue[Waiter]) -> Waiter:
    head = queue.head()
    assert head is not None
    queue.pop(head)
    return head


def names(waiters: list[Waiter]) -> list[str]:
    return [str(waiter) for waiter in waiters]


def many(names: str, **more: Any) -> list[Waiter]:
    return [Waiter(name, **more) for name in names.split()]


def test_one_key_is_served_first_come_first_served():
    assert order(queue_of(*many("a b c"))) == ["a", "b", "c"]


def test_keys_take_turns_and_each_keeps_its_own_order():
    queue = queue_of(*many("a1 a2 a3 a4", key="a"), *many("b1 b2", key="b"), *many("c1", key="c"))
    assert order(queue) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_returning_key_goes_behind_the_waiting_keys():
    queue = queue_of(*many("a1", key="a"), *many("b1 b2", key="b"))
    assert pop(queue).name == "a1"
    queue.add(Waiter("a2", key="a"))
    assert order(queue) == ["b1", "a2", "b2"]


def test_background_waiters_follow_main_waiters():
    queue = queue_of(*many("x y", priority="background"), *many("a b"))
    assert order(queue) == ["a", "b", "x", "y"]


def test_a_background_waiter_is_admitted_after_eight_main_waiters():
    queue = queue_of(*many("x y", priority="background"), *many(" ".join(f"m{i}" for i in range(20))))
    got = order(queue)
    assert (got.index("x"), got.index("y")) == (8, 17)


def test_a_heavy_head_is_not_overtaken():
    heavy = Waiter("heavy", weight=4)
    queue = queue_of(heavy, *many("light"))
    assert queue.head() is heavy


def test_keys_that_run_nothing_come_first_and_others_only_if_they_may_start():
    queue = queue_of(*many("a1 a2", key="a"), *many("b1", key="b"), *many("x", key="c", priority="background"))
    queue.slots.start("a", 1)
    assert str(queue.head()) == "b1"
    queue.slots.start("b", 1)
    assert str(queue.head()) == "a1"
    assert str(queue.head(lambda one: one.key == "c")) == "x"
    queue.slots.start("c", 1)
    assert queue.head(lambda _: False) is None
    assert order(queue) == ["a1", "b1", "a2", "x"]


def test_the_newest_of_the_key_with_the_most_waiters_makes_room_for_another_key():
    queue = queue_of(*many("a1 a2 a3", key="a"), *many("b1", key="b"), max_waiting=4)
    assert names(queue.displaced_by(Waiter("c1", key="c"))) == ["a3"]
    assert names(queue.displaced_by(Waiter("b2", key="b"))) == ["a3"]
    assert queue.displaced_by(Waiter("a4", key="a")) == []
    assert queue_of(*many("a1", key="a"), *many("b1", key="b"), max_waiting=2).displaced_by(Waiter("c")) == []
    assert queue_of(*many("a1 a2", key="a"), max_waiting=4).displaced_by(Waiter("c")) == []


def test_a_background_waiter_makes_room_first():
    queue = queue_of(*many("a1 a2", key="a"), Waiter("x", "a", "background"), max_waiting=3)
    assert names(queue.displaced_by(Waiter("c", key="c"))) == ["x"]


def test_as_many_make_room_as_a_prompt_needs_and_none_if_that_is_not_enough():
    queue = queue_of(*many("a1 a2 a3 a4", key="a", tokens=10), max_tokens=40)
    assert names(queue.displaced_by(Waiter("c", key="c", tokens=15))) == ["a4", "a3"]
    assert queue.displaced_by(Waiter("c", key="c", tokens=35)) == []
    assert queue.displaced_by(Waiter("c", key="c", tokens=41)) == []
    assert queue_of(max_tokens=40).displaced_by(Waiter("c", tokens=41)) == []


def test_a_full_queue_refuses_with_its_length():
    queue = queue_of(*many("a b"), max_waiting=2)
    with pytest.raises(Overloaded) as refused:
        queue.add(Waiter("c"))
    assert refused.value.position == 3
    assert refused.value.retry_after == 2.0


@pytest.mark.parametrize(
    ("served", "slots", "retry"),
    [
        ([], 1, 10.0),  # no service time known: one second per round
        ([4.0], 1, 40.0),
        ([4.0], 5, 8.0),
        ([0.01], 1, 1.0),  # at least a second
        ([1000.0], 1, 300.0),  # at most five minutes
        ([1.0, 2.0], 10, 1.2),  # a moving average
    ],
)
def test_the_retry_hint_follows_from_recent_service_times(served: list[float], slots: int, retry: float):
    queue = queue_of(*many("a b c d e f g h i j"), max_waiting=10)
    for seconds in served:
        queue.record_service(seconds)
    with pytest.raises(Overloaded) as refused:
        queue.add(Waiter("late"), slots)
    assert refused.value.retry_after == pytest.approx(retry)


def test_the_queue_is_limited_by_prompt_tokens():
    queue = queue_of(Waiter("b", tokens=90), max_tokens=100)
    with pytest.raises(Overloaded, match="90 prompt tokens"):
        queue.add(Waiter("c", tokens=20))
    queue.add(Waiter("d", tokens=10))
    assert queue.waiting_tokens == 100


def test_removing_a_waiter_frees_its_tokens():
    b = Waiter("b", tokens=100)
    queue = queue_of(b, max_tokens=100)
    queue.remove(b)
    assert (queue.waiting, queue.waiting_tokens) == (0, 0)
    queue.add(Waiter("c", tokens=100))
    assert repr(queue) == "<RequestQueue 1 waiting>"


def test_removing_a_waiter_keeps_the_order_of_the_others():
    a, b, c = many("a b c")
    queue = queue_of(a, b, c)
    queue.remove(b)
    assert order(queue) == ["a", "c"]


def test_positions_predict_the_order():
    waiters = [*many("a1 a2 a3", key="a"), *many("b1", key="b"), *many("c1 c2", key="c")]
    waiters += many("x1 x2", priority="background")
    queue = queue_of(*waiters)
    positions = {waiter.name: queue.position(waiter) for waiter in waiters}
    assert sorted(positions, key=positions.__getitem__) == order(queue)
    assert sorted(positions.values()) == list(range(1, 9))


def test_positions_decrease_when_the_head_is_served():
    a, b, c = many("a b c")
    queue = queue_of(a, b, c)
    pop(queue)
    assert (queue.position(b), queue.position(c)) == (1, 2)


def test_oldest_considers_all_keys_and_priorities():
    queue = queue_of(
        Waiter("a", key="a", since=5.0), Waiter("b", key="b", since=3.0), Waiter("x", priority="background", since=4)
    )
    assert queue.oldest() == 3.0
    assert queue_of().oldest() is None


def test_clear_returns_all_waiters():
    queue = queue_of(*many("a b", key="k"), *many("x", priority="background"))
    assert {waiter.name for waiter in queue.clear()} == {"a", "b", "x"}
    assert (queue.waiting, queue.waiting_tokens, queue.head()) == (0, 0, None)
