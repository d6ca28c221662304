"""Which replica takes a request."""

from __future__ import annotations

from dataclasses import dataclass

from modelyard.scheduler.affinity import ReplicaAffinity, prefix_hashes


@dataclass
class One:
    id: int
    running: int = 0


LONG = list(range(5000))


def test_the_least_busy_takes_what_nobody_knows():
    assert ReplicaAffinity().choose(None, (), [One(1, 3), One(2, 1), One(3, 2)]).id == 2


def test_a_session_goes_back_to_its_replica_though_it_is_busier():
    affinity = ReplicaAffinity()
    affinity.record("s", (), 1)
    assert affinity.choose("s", (), [One(1, 30), One(2, 0)]).id == 1


def test_a_session_whose_replica_has_no_room_goes_elsewhere():
    affinity = ReplicaAffinity()
    affinity.record("s", (), 1)
    assert affinity.choose("s", (), [One(2, 0)]).id == 2


def test_a_session_counts_more_than_a_prefix():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 1)
    affinity.record("s", (), 2)
    assert affinity.choose("s", prefix_hashes(LONG), [One(1), One(2)]).id == 2


def test_a_known_prefix_is_preferred_while_its_replica_is_not_much_busier():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 2)
    assert affinity.choose(None, prefix_hashes(LONG), [One(1, 0), One(2, 2)]).id == 2
    assert affinity.choose(None, prefix_hashes(LONG), [One(1, 0), One(2, 3)]).id == 1


def test_the_longest_known_beginning_wins():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 1)
    affinity.record(None, prefix_hashes(LONG[:100]), 2)  # takes the short beginning over
    assert affinity.choose(None, prefix_hashes([*LONG[:4096], 7]), [One(1), One(2)]).id == 1
    assert affinity.choose(None, prefix_hashes([*LONG[:80], 7, 7]), [One(1), One(2)]).id == 2


def test_short_prompts_have_no_beginning_worth_remembering():
    assert prefix_hashes(LONG[:63]) == ()
    assert len(prefix_hashes(LONG[:64])) == 1
    assert prefix_hashes(LONG[:512])[-1] == prefix_hashes(LONG[:64])[0]


def test_what_is_remembered_is_bounded():
    affinity = ReplicaAffinity(size=2)
    for session in "abc":
        affinity.record(session, (), 1)
    assert affinity.choose("a", (), [One(1, 5), One(2)]).id == 2
    assert affinity.choose("c", (), [One(1, 5), One(2)]).id == 1
