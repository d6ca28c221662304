"""Which replica takes a request."""

from __future__ import annotations

from dataclasses import dataclass

from modelyard.scheduler.affinity import Affinity, marks


@dataclass
class One:
    id: int
    running: int = 0


LONG = list(range(5000))


def test_the_least_busy_takes_what_nobody_knows():
    assert Affinity().choose(None, (), [One(1, 3), One(2, 1), One(3, 2)]).id == 2


def test_a_session_goes_back_to_its_replica_though_it_is_busier():
    affinity = Affinity()
    affinity.remember("s", (), 1)
    assert affinity.choose("s", (), [One(1, 30), One(2, 0)]).id == 1


def test_a_session_whose_replica_has_no_room_goes_elsewhere():
    affinity = Affinity()
    affinity.remember("s", (), 1)
    assert affinity.choose("s", (), [One(2, 0)]).id == 2


def test_a_session_counts_more_than_a_prefix():
    affinity = Affinity()
    affinity.remember(None, marks(LONG), 1)
    affinity.remember("s", (), 2)
    assert affinity.choose("s", marks(LONG), [One(1), One(2)]).id == 2


def test_a_known_prefix_is_preferred_while_its_replica_is_not_much_busier():
    affinity = Affinity()
    affinity.remember(None, marks(LONG), 2)
    assert affinity.choose(None, marks(LONG), [One(1, 0), One(2, 2)]).id == 2
    assert affinity.choose(None, marks(LONG), [One(1, 0), One(2, 3)]).id == 1


def test_the_longest_known_beginning_wins():
    affinity = Affinity()
    affinity.remember(None, marks(LONG), 1)
    affinity.remember(None, marks(LONG[:100]), 2)  # takes the short beginning over
    assert affinity.choose(None, marks([*LONG[:4096], 7]), [One(1), One(2)]).id == 1
    assert affinity.choose(None, marks([*LONG[:80], 7, 7]), [One(1), One(2)]).id == 2


def test_short_prompts_have_no_beginning_worth_remembering():
    assert marks(LONG[:63]) == ()
    assert len(marks(LONG[:64])) == 1
    assert marks(LONG[:512])[-1] == marks(LONG[:64])[0]


def test_what_is_remembered_is_bounded():
    affinity = Affinity(size=2)
    for session in "abc":
        affinity.remember(session, (), 1)
    assert affinity.choose("a", (), [One(1, 5), One(2)]).id == 2
    assert affinity.choose("c", (), [One(1, 5), One(2)]).id == 1
