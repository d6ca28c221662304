from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.processes.child_process import OutputTail


def test_only_the_last_lines_are_kept_and_the_others_counted() -> None:
    ring = OutputTail(max_lines=2)
    ring.feed(b"a\nb\nc\nd\n")
    assert ring.lines() == ["c", "d"]
    assert ring.dropped == 2
    assert len(ring) == 2


def test_a_line_that_has_not_ended_is_shown_last() -> None:
    ring = OutputTail(max_lines=2)
    ring.feed(b"one\ntwo\nerror: no mem")
    assert ring.lines() == ["one", "two", "error: no mem"]
    ring.feed(b"ory\n")
    assert ring.tail(1) == "error: no memory"


def test_a_line_without_end_is_cut_and_the_next_one_is_whole() -> None:
    ring = OutputTail(max_line=5)
    for _ in range(1000):
        ring.feed(b"xyz")
    ring.feed(b"\nnext\n")
    assert ring.lines() == ["xyzxy", "next"]


def test_carriage_returns_and_broken_characters_do_no_harm() -> None:
    ring = OutputTail()
    ring.feed(b"windows\r\n\xff\xfe\n\n")
    assert ring.lines() == ["windows", "\ufffd\ufffd", ""]


def test_tail_of_nothing_is_empty() -> None:
    ring = OutputTail()
    ring.feed(b"a\n")
    assert (ring.tail(0), OutputTail().tail(5)) == ("", "")


@given(st.lists(st.binary(max_size=12), max_size=12))
@settings(deadline=None, max_examples=100)
def test_where_the_bytes_are_cut_makes_no_difference(bits: list[bytes]) -> None:
    cut, whole = OutputTail(3, 6), OutputTail(3, 6)
    for bit in bits:
        cut.feed(bit)
    whole.feed(b"".join(bits))
    assert cut.lines() == whole.lines()
    assert cut.dropped == whole.dropped
