"""Which replica takes a request."""

from __future__ import annotations

from dataclasses import dataclass

from modelyard.scheduler.pooled_model import ReplicaAffinity, prefix_hashes


@dataclass
class Candidate:
    id: int
    running: int = 0


LONG = list(range(5000))


def test_an_unknown_request_goes_to_the_least_busy_replica():
    assert ReplicaAffinity().choose(None, (), [Candidate(1, 3), Candidate(2, 1), Candidate(3, 2)]).id == 2


def test_a_session_returns_to_its_replica_even_if_it_is_busier():
    affinity = ReplicaAffinity()
    affinity.record("s", (), 1)
    assert affinity.choose("s", (), [Candidate(1, 30), Candidate(2, 0)]).id == 1


def test_a_session_goes_elsewhere_if_its_replica_has_no_room():
    affinity = ReplicaAffinity()
    affinity.record("s", (), 1)
    assert affinity.choose("s", (), [Candidate(2, 0)]).id == 2


def test_a_session_has_priority_over_a_prefix():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 1)
    affinity.record("s", (), 2)
    assert affinity.choose("s", prefix_hashes(LONG), [Candidate(1), Candidate(2)]).id == 2


def test_a_known_prefix_is_preferred_while_its_replica_is_not_much_busier():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 2)
    assert affinity.choose(None, prefix_hashes(LONG), [Candidate(1, 0), Candidate(2, 2)]).id == 2
    assert affinity.choose(None, prefix_hashes(LONG), [Candidate(1, 0), Candidate(2, 3)]).id == 1


def test_the_longest_known_prefix_wins():
    affinity = ReplicaAffinity()
    affinity.record(None, prefix_hashes(LONG), 1)
    affinity.record(None, prefix_hashes(LONG[:100]), 2)  # replaces the replica of the short prefix
    assert affinity.choose(None, prefix_hashes([*LONG[:4096], 7]), [Candidate(1), Candidate(2)]).id == 1
    assert affinity.choose(None, prefix_hashes([*LONG[:80], 7, 7]), [Candidate(1), Candidate(2)]).id == 2


def test_short_prompts_have_no_prefix_hashes():
    assert prefix_hashes(LONG[:63]) == ()
    assert len(prefix_hashes(LONG[:64])) == 1
    assert prefix_hashes(LONG[:512])[-1] == prefix_hashes(LONG[:64])[0]


def test_the_number_of_entries_is_limited():
    affinity = ReplicaAffinity(size=2)
    for session in "abc":
        affinity.record(session, (), 1)
    assert affinity.choose("a", (), [Candidate(1, 5), Candidate(2)]).id == 2
    assert affinity.choose("c", (), [Candidate(1, 5), Candidate(2)]).id == 1
