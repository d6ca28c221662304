from __future__ import annotations

import logging
import stat
from pathlib import Path
from threading import Event

import pytest

from modelyard.telemetry.request_capture import (
    CapturedRequest,
    CombinedCaptureSink,
    DiskCaptureSink,
    MemoryCaptureSink,
    RequestCapture,
)

_MANY = 1000


def _record(capture: RequestCapture, response: bytes = b'{"ok":true}') -> None:
    capture.request(b'{"model":"m"}')
    capture.prompt("<|user|>hi")
    capture.output("hel")
    capture.output("lo")
    capture.response(response)
    capture.close()


def _files(folder: Path) -> dict[str, str]:
    """Contents by name, without the time and trace in front."""
    return {path.name.split(".", 2)[2]: path.read_text() for path in folder.iterdir()}


def _traces(folder: Path) -> set[str]:
    return {path.name.split("-", 1)[1].split(".")[0] for path in folder.iterdir()}


def test_a_request_is_written_to_four_files(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path / "debug", 10, 10_000)
    _record(sink.start("req1"))
    sink.close()
    assert _files(tmp_path / "debug") == {
        "1-client-request.json": '{"model":"m"}',
        "2-prompt.txt": "<|user|>hi",
        "3-model-output.txt": "hello",
        "4-client-response.json": '{"ok":true}',
    }
    assert _traces(tmp_path / "debug") == {"req1"}


def test_a_streamed_response_has_the_suffix_sse(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path, 10, 10_000)
    capture = sink.start("req1")
    capture.response(b"event: ping\n\n")
    capture.response(b'data: {"a":1}\n\n')
    capture.close()
    sink.close()
    assert _files(tmp_path)["4-client-response.sse"] == 'event: ping\n\ndata: {"a":1}\n\n'


def test_a_long_output_is_complete_and_in_order(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path, 10, 10_000_000)
    capture = sink.start("req1")
    parts = [f"{n:0999d}\n" for n in range(300)]
    for part in parts:
        capture.output(part)
    capture.close()
    sink.close()
    assert _files(tmp_path)["3-model-output.txt"] == "".join(parts)


def test_files_are_readable_for_their_owner_only(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path / "debug", 10, 10_000)
    _record(sink.start("req1"))
    sink.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "debug").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "debug").stat().st_mode) == 0o700


def test_the_oldest_requests_are_deleted_when_there_are_too_many(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path, 2, 1_000_000)
    for n in range(5):
        _record(sink.start(f"req{n}"))
    sink.close()
    assert _traces(tmp_path) == {"req3", "req4"}


def test_the_oldest_requests_are_deleted_when_they_are_too_large(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path, 100, 5000)
    for n in range(5):
        _record(sink.start(f"req{n}"), b"{" + bytes(2000))
    sink.close()
    assert _traces(tmp_path) == {"req3", "req4"}


def test_other_files_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "20250101T000000.000000Z-mine.txt").write_text("mine too")
    sink = DiskCaptureSink(tmp_path, 1, 1)
    _record(sink.start("req1"))
    sink.close()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "20250101T000000.000000Z-mine.txt"}


def test_a_trace_cannot_escape_the_folder(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path / "debug", 10, 10_000)
    _record(sink.start("../../etc/passwd" + "x" * 500))
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["debug"]
    assert len(list((tmp_path / "debug").iterdir())) == 4


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path: Path) -> None:
    sink = DiskCaptureSink(tmp_path, 10, 10_000)
    capture = sink.start("req1")
    capture.prompt("a\ud800b")
    capture.close()
    sink.close()
    assert _files(tmp_path)["2-prompt.txt"] == "a\\ud800b"


def test_a_slow_disk_drops_and_counts_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, busy = Event(), Event()

    def slow(path: Path, data: bytes) -> None:
        busy.set()
        disk.wait()

    monkeypatch.setattr("modelyard.telemetry.request_capture._append", slow)
    sink = DiskCaptureSink(tmp_path, 10, 10_000, max_queued=2)
    capture = sink.start("req1")
    capture.request(b"{}")
    assert busy.wait(60)
    for _ in range(_MANY):
        capture.request(b"{}")
    disk.set()
    sink.close()
    assert sink.dropped == _MANY - 2


def test_a_missing_folder_is_reported_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "debug"
    sink = DiskCaptureSink(folder, 10, 10_000)
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        _record(sink.start("req1"))
        sink.close()
    assert sink.dropped == 4
    assert [record.getMessage() for record in caplog.records] == [
        "request capture cannot write: check the folder and its disk"
    ]


def write(sink: MemoryCaptureSink | CombinedCaptureSink, trace: str, text: str = "") -> None:
    capture = sink.start(trace)
    if capture is None:
        return
    capture.request(b'{"a": 1}')
    capture.prompt("<user>" + text)
    for part in ("Hel", "lo"):
        capture.output(part)
    capture.response(b"data: 1\n\n")
    capture.response(b"data: 2\n\n")
    capture.close()


def test_memory_keeps_all_texts_of_a_request() -> None:
    sink = MemoryCaptureSink(10_000, enabled=True)
    write(sink, "a")
    assert sink.find("a") == CapturedRequest('{"a": 1}', "<user>", "Hello", "data: 1\n\ndata: 2\n\n")
    assert sink.find("b") is None


def test_a_disabled_sink_captures_nothing() -> None:
    sink = MemoryCaptureSink(10_000, enabled=False)
    assert sink.start("a") is None


def test_disabling_forgets_everything_including_open_captures() -> None:
    sink = MemoryCaptureSink(10_000, enabled=True)
    write(sink, "a")
    late = sink.start("late")
    assert late is not None
    sink.set_enabled(False)
    late.close()
    sink.set_enabled(True)
    assert sink.find("a") is None
    assert sink.find("late") is None


def test_memory_drops_the_oldest_requests_beyond_its_bytes() -> None:
    sink = MemoryCaptureSink(1000, enabled=True)
    for trace in "abc":
        write(sink, trace, "x" * 400)
    assert sink.find("a") is None
    assert sink.find("b") is not None
    assert sink.find("c") is not None


def test_a_long_text_is_truncated_with_a_note() -> None:
    sink = MemoryCaptureSink(1 << 30, enabled=True)
    write(sink, "a", "x" * (1 << 21))
    found = sink.find("a")
    assert found is not None
    assert len(found.prompt) < (1 << 20) + 100
    assert found.prompt.endswith("too long to keep]")


def test_combined_sinks_capture_the_same() -> None:
    one, other = MemoryCaptureSink(10_000, enabled=True), MemoryCaptureSink(10_000, enabled=True)
    write(CombinedCaptureSink(one, other), "a")
    assert one.find("a") == other.find("a") == CapturedRequest('{"a": 1}', "<user>", "Hello", "data: 1\n\ndata: 2\n\n")


def test_a_disabled_sink_adds_nothing_to_the_other() -> None:
    off, on = MemoryCaptureSink(10_000, enabled=False), MemoryCaptureSink(10_000, enabled=True)
    capture = CombinedCaptureSink(off, on).start("a")
    assert type(capture) is type(on.start("a"))
    assert CombinedCaptureSink(off, off).start("a") is None
