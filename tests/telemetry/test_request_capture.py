"""The texts of requests are kept only where switched on, bounded in bytes."""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from threading import Event

import pytest

from modelyard.telemetry.request_capture import (
    NULL_CAPTURE,
    CapturedRequest,
    CombinedCaptureSink,
    DiskCaptureSink,
    MemoryCaptureSink,
    RequestCapture,
)

_MANY = 1000


def _record(entry: RequestCapture, response: bytes = b'{"ok":true}') -> None:
    entry.request(b'{"model":"m"}')
    entry.prompt("<|user|>hi")
    entry.output("hel")
    entry.output("lo")
    entry.response(response)
    entry.close()


def _files(folder: Path) -> dict[str, str]:
    """Contents by name, without the time and trace in front."""
    return {path.name.split(".", 2)[2]: path.read_text() for path in folder.iterdir()}


def _traces(folder: Path) -> set[str]:
    return {path.name.split("-", 1)[1].split(".")[0] for path in folder.iterdir()}


def test_a_request_leaves_four_files(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path / "debug", 10, 10_000)
    _record(journal.entry("req1"))
    journal.close()
    assert _files(tmp_path / "debug") == {
        "1-client-request.json": '{"model":"m"}',
        "2-prompt.txt": "<|user|>hi",
        "3-model-output.txt": "hello",
        "4-client-response.json": '{"ok":true}',
    }
    assert _traces(tmp_path / "debug") == {"req1"}


def test_a_streamed_response_is_named_for_it(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path, 10, 10_000)
    entry = journal.entry("req1")
    entry.response(b"event: ping\n\n")
    entry.response(b'data: {"a":1}\n\n')
    entry.close()
    journal.close()
    assert _files(tmp_path)["4-client-response.sse"] == 'event: ping\n\ndata: {"a":1}\n\n'


def test_a_long_output_arrives_whole_and_in_order(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path, 10, 10_000_000)
    entry = journal.entry("req1")
    bits = [f"{n:0999d}\n" for n in range(300)]
    for bit in bits:
        entry.output(bit)
    entry.close()
    journal.close()
    assert _files(tmp_path)["3-model-output.txt"] == "".join(bits)


def test_the_files_are_for_their_owner_only(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path / "debug", 10, 10_000)
    _record(journal.entry("req1"))
    journal.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "debug").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "debug").stat().st_mode) == 0o700


def test_the_oldest_requests_leave_when_there_are_too_many(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path, 2, 1_000_000)
    for n in range(5):
        _record(journal.entry(f"req{n}"))
    journal.close()
    assert _traces(tmp_path) == {"req3", "req4"}


def test_the_oldest_requests_leave_when_they_are_too_large(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path, 100, 5000)
    for n in range(5):
        _record(journal.entry(f"req{n}"), b"{" + bytes(2000))
    journal.close()
    assert _traces(tmp_path) == {"req3", "req4"}


def test_files_of_others_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "20250101T000000.000000Z-mine.txt").write_text("mine too")
    journal = DiskCaptureSink(tmp_path, 1, 1)
    _record(journal.entry("req1"))
    journal.close()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "20250101T000000.000000Z-mine.txt"}


def test_a_trace_cannot_leave_the_folder(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path / "debug", 10, 10_000)
    _record(journal.entry("../../etc/passwd" + "x" * 500))
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["debug"]
    assert len(list((tmp_path / "debug").iterdir())) == 4


def test_a_lone_surrogate_is_written_as_what_it_is(tmp_path: Path) -> None:
    journal = DiskCaptureSink(tmp_path, 10, 10_000)
    entry = journal.entry("req1")
    entry.prompt("a\ud800b")
    entry.close()
    journal.close()
    assert _files(tmp_path)["2-prompt.txt"] == "a\\ud800b"


def test_a_writer_that_falls_behind_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, busy = Event(), Event()

    def slow(path: Path, data: bytes) -> None:
        busy.set()
        disk.wait()

    monkeypatch.setattr("modelyard.telemetry.request_capture._append", slow)
    journal = DiskCaptureSink(tmp_path, 10, 10_000, backlog=2)
    entry = journal.entry("req1")
    entry.request(b"{}")
    assert busy.wait(60)
    for _ in range(_MANY):
        entry.request(b"{}")
    disk.set()
    journal.close()
    assert journal.dropped == _MANY - 2


def test_a_folder_that_vanished_is_reported_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "debug"
    journal = DiskCaptureSink(folder, 10, 10_000)
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        _record(journal.entry("req1"))
        journal.close()
    assert journal.dropped == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the debug journal cannot write: check the folder and its disk"
    ]


def test_the_silent_entry_takes_everything_and_keeps_nothing() -> None:
    _record(NULL_CAPTURE)
    assert not hasattr(NULL_CAPTURE, "__dict__")


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
