"""What a client of a broken server is counted as, and which of it is bad."""

from __future__ import annotations

from bench.fates import LONGEST_S, Fates


async def test_only_whole_answers_and_errors_in_time_are_good() -> None:
    fates = Fates()
    fates.faults += [10.0, 20.0]
    fates.came("whole", 1.0, 9.0)  # before anything happened: it may take as long as it likes
    fates.came("error", 9.0, 10.0 + LONGEST_S, "the worker was lost")
    fates.came("cut", 19.0, 21.0)
    assert fates.bad(("cut",)) == {}
    assert fates.bad(()) == {"cut": 1}
    fates.came("whole", 19.0, 20.0 + LONGEST_S + 0.1)
    fates.came("MIXED", 1.0, 2.0, "somebody else's words")
    assert fates.bad(("cut",)) == {"whole, late": 1, "MIXED": 1}
    assert (fates.counts["whole"], fates.counts["error"]) == (1, 1)
    assert round(fates.worst, 1) == LONGEST_S + 0.1
    assert fates.words["the worker was lost"] == 1


async def test_the_wait_is_counted_from_the_first_fault_that_a_request_met() -> None:
    fates = Fates()
    fates.faults += [10.0, 11.0]
    fates.came("error", 9.0, 12.0)
    assert fates.worst == 2.0
