"""What pip prints, read line by line."""

from __future__ import annotations

import pytest

from modelyard.library import default_model


def test_progress_is_told_on_and_the_last_error_is_the_reason():
    told: list[tuple[int, int]] = []
    lines = ["Collecting x\n", "Progress 0 of 10\n", "Progress 10 of 10\n", "ERROR: no space\n", "\n", "note\n"]
    assert default_model.parse_pip_output(lines, lambda done, total: told.append((done, total))) == "no space"
    assert told == [(0, 10), (10, 10)]


def test_a_connection_that_broke_is_the_reason_of_all_that_follows():
    lines = [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"refused\")': /simple/x/\n",
        "ERROR: No matching distribution found for x\n",
    ]
    told = default_model.parse_pip_output(lines, lambda done, total: None)
    assert told == "connection broken by 'NewConnectionError(\"refused\")'"


def test_without_an_error_the_last_line_is_the_reason():
    assert default_model.parse_pip_output(["a\n", "b\n"], lambda done, total: None) == "b"
    assert default_model.parse_pip_output([], lambda done, total: None) == ""


def test_an_environment_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.library.default_model.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("modelyard.library.default_model.shutil.which", lambda name: f"/bin/{name}")
    assert default_model._pip() == ["/bin/uv", "tool", "run", "pip"]


@pytest.mark.parametrize(
    ("version", "bar"), [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.1b1", "raw"), (None, "raw")]
)
def test_a_pip_that_knows_no_raw_progress_works_in_silence(version: str | None, bar: str):
    assert default_model.pip_progress_bar(version) == bar
