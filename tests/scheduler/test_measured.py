"""The ledger of what loads really took."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.scheduler.memory_planner import LoadMeasurement, MeasurementStore


def test_what_was_measured_is_known_to_the_next_run(tmp_path: Path):
    ledger = MeasurementStore(tmp_path / "new" / "measured.json")
    ledger.put("a", LoadMeasurement(5, 1.5))
    ledger.save(ledger.encode())
    again = MeasurementStore(tmp_path / "new" / "measured.json")
    assert again.get("a") == LoadMeasurement(5, 1.5)
    assert again.get("b") is None
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["measured.json"]


def test_a_load_that_nobody_could_measure_keeps_the_bytes_of_the_last():
    ledger = MeasurementStore()
    ledger.put("a", LoadMeasurement(5, 1.0))
    ledger.put("a", LoadMeasurement(None, 2.0))
    assert ledger.get("a") == LoadMeasurement(5, 2.0)


def test_only_the_newest_are_kept():
    ledger = MeasurementStore()
    for number in range(300):
        ledger.put(str(number), LoadMeasurement(number, 0.0))
    assert ledger.get("43") is None
    assert ledger.get("44") == LoadMeasurement(44, 0.0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": {"bytes": "x"}}', b"[]"])
def test_a_file_that_cannot_be_read_is_made_anew(tmp_path: Path, content: bytes):
    path = tmp_path / "measured.json"
    path.write_bytes(content)
    ledger = MeasurementStore(path)
    assert ledger.get("a") is None
    ledger.put("a", LoadMeasurement(1, 1.0))
    ledger.save(ledger.encode())
    assert MeasurementStore(path).get("a") == LoadMeasurement(1, 1.0)


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    ledger = MeasurementStore(tmp_path / "file" / "measured.json")
    ledger.save(b"{}")
    assert "cannot save memory measurements" in caplog.text
