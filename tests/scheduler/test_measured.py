"""The ledger of what loads really took."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.scheduler.measured import Ledger, Measured


def test_what_was_measured_is_known_to_the_next_run(tmp_path: Path):
    ledger = Ledger(tmp_path / "new" / "measured.json")
    ledger.put("a", Measured(5, 1.5))
    ledger.save(ledger.encode())
    again = Ledger(tmp_path / "new" / "measured.json")
    assert again.get("a") == Measured(5, 1.5)
    assert again.get("b") is None
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["measured.json"]


def test_a_load_that_nobody_could_measure_keeps_the_bytes_of_the_last():
    ledger = Ledger()
    ledger.put("a", Measured(5, 1.0))
    ledger.put("a", Measured(None, 2.0))
    assert ledger.get("a") == Measured(5, 2.0)


def test_only_the_newest_are_kept():
    ledger = Ledger()
    for number in range(300):
        ledger.put(str(number), Measured(number, 0.0))
    assert ledger.get("43") is None
    assert ledger.get("44") == Measured(44, 0.0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": {"bytes": "x"}}', b"[]"])
def test_a_file_that_cannot_be_read_is_made_anew(tmp_path: Path, content: bytes):
    path = tmp_path / "measured.json"
    path.write_bytes(content)
    ledger = Ledger(path)
    assert ledger.get("a") is None
    ledger.put("a", Measured(1, 1.0))
    ledger.save(ledger.encode())
    assert Ledger(path).get("a") == Measured(1, 1.0)


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    ledger = Ledger(tmp_path / "file" / "measured.json")
    ledger.save(b"{}")
    assert "not remembered" in caplog.text
