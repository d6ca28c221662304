"""The golden-file helper fails when it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocols import golden


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden, "_HOME", tmp_path)
    monkeypatch.delenv("MODELYARD_GOLDEN", raising=False)
    return tmp_path


def test_a_missing_file_fails_with_a_remedy() -> None:
    with pytest.raises(pytest.fail.Exception, match="MODELYARD_GOLDEN=write"):
        golden.check_golden("p", "a", b"x")


def test_a_difference_fails_with_a_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_GOLDEN", "write")
    golden.check_golden("p", "a", b'{"b":1,"a":2}')
    monkeypatch.delenv("MODELYARD_GOLDEN")
    golden.check_golden("p", "a", b'{"b": 1, "a": 2}')
    with pytest.raises(pytest.fail.Exception, match=r'\+  "a": 3'):
        golden.check_golden("p", "a", b'{"b":1,"a":3}')
