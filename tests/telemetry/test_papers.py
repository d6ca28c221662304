"""The texts of requests are kept only where switched on, bounded in bytes."""

from __future__ import annotations

from modelyard.telemetry.request_capture import CapturedRequest, CombinedCaptureSink, MemoryCaptureSink


def write(scribe: MemoryCaptureSink | CombinedCaptureSink, trace: str, text: str = "") -> None:
    entry = scribe.entry(trace)
    if entry is None:
        return
    entry.request(b'{"a": 1}')
    entry.prompt("<user>" + text)
    for bit in ("Hel", "lo"):
        entry.output(bit)
    entry.response(b"data: 1\n\n")
    entry.response(b"data: 2\n\n")
    entry.close()


def test_a_request_is_kept_whole() -> None:
    papers = MemoryCaptureSink(10_000, on=True)
    write(papers, "a")
    assert papers.find("a") == CapturedRequest('{"a": 1}', "<user>", "Hello", "data: 1\n\ndata: 2\n\n")
    assert papers.find("b") is None


def test_nothing_is_kept_where_it_is_off() -> None:
    papers = MemoryCaptureSink(10_000, on=False)
    assert papers.entry("a") is None


def test_switching_it_off_forgets_everything_also_what_is_being_written() -> None:
    papers = MemoryCaptureSink(10_000, on=True)
    write(papers, "a")
    late = papers.entry("late")
    assert late is not None
    papers.switch(False)
    late.close()
    papers.switch(True)
    assert papers.find("a") is None
    assert papers.find("late") is None


def test_the_oldest_leave_when_there_are_too_many_bytes() -> None:
    papers = MemoryCaptureSink(1000, on=True)
    for trace in "abc":
        write(papers, trace, "x" * 400)
    assert papers.find("a") is None
    assert papers.find("b") is not None
    assert papers.find("c") is not None


def test_a_text_that_is_too_long_is_cut_and_says_so() -> None:
    papers = MemoryCaptureSink(1 << 30, on=True)
    write(papers, "a", "x" * (1 << 21))
    found = papers.find("a")
    assert found is not None
    assert len(found.prompt) < (1 << 20) + 100
    assert found.prompt.endswith("too long to keep]")


def test_two_scribes_write_the_same() -> None:
    one, other = MemoryCaptureSink(10_000, on=True), MemoryCaptureSink(10_000, on=True)
    write(CombinedCaptureSink(one, other), "a")
    assert one.find("a") == other.find("a") == CapturedRequest('{"a": 1}', "<user>", "Hello", "data: 1\n\ndata: 2\n\n")


def test_a_scribe_that_is_off_costs_the_other_nothing() -> None:
    off, on = MemoryCaptureSink(10_000, on=False), MemoryCaptureSink(10_000, on=True)
    entry = CombinedCaptureSink(off, on).entry("a")
    assert type(entry) is type(on.entry("a"))
    assert CombinedCaptureSink(off, off).entry("a") is None
