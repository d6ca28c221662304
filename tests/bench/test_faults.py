"""The outcomes of requests to a broken server, and which of them are failures."""

from __future__ import annotations

from bench.faults import MAX_WAIT_S, Outcomes


async def test_only_complete_responses_and_errors_in_time_are_expected() -> None:
    outcomes = Outcomes()
    outcomes.faults += [10.0, 20.0]
    outcomes.add("complete", 1.0, 9.0)  # before any fault: it may take any time
    outcomes.add("error", 9.0, 10.0 + MAX_WAIT_S, "the worker was lost")
    outcomes.add("cut", 19.0, 21.0)
    assert outcomes.unexpected(("cut",)) == {}
    assert outcomes.unexpected(()) == {"cut": 1}
    outcomes.add("complete", 19.0, 20.0 + MAX_WAIT_S + 0.1)
    outcomes.add("MIXED", 1.0, 2.0, "text of another request")
    assert outcomes.unexpected(("cut",)) == {"complete, late": 1, "MIXED": 1}
    assert (outcomes.counts["complete"], outcomes.counts["error"]) == (1, 1)
    assert round(outcomes.longest_wait_s, 1) == MAX_WAIT_S + 0.1
    assert outcomes.messages["the worker was lost"] == 1


async def test_the_wait_counts_from_the_first_fault_during_a_request() -> None:
    outcomes = Outcomes()
    outcomes.faults += [10.0, 11.0]
    outcomes.add("error", 9.0, 12.0)
    assert outcomes.longest_wait_s == 2.0
