"""What a process dies with again and again is set aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.library.attempts import Attempts


def test_what_processes_have_died_with_twice_is_set_aside_until_it_works(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "attempts")
    assert attempts.set_aside() == []
    assert attempts.begin("model a")  # and the process dies
    assert Attempts(tmp_path / "attempts").begin("model a")
    assert attempts.set_aside() == [], "it is tried for the second time"
    assert not attempts.begin("model a")
    assert not attempts.begin("model a")
    assert attempts.set_aside() == ["model a"]
    assert attempts.begin("model b")
    attempts.end("model a")
    assert attempts.set_aside() == []
    assert attempts.begin("model a")


def test_what_fails_without_a_death_is_tried_again(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)

    def fail() -> None:
        with attempts.trying("kv file") as may_try:
            assert may_try
            raise ValueError("damaged")

    for _ in range(5):
        with pytest.raises(ValueError, match="damaged"):
            fail()


def test_a_folder_that_cannot_be_written_holds_up_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(5):
        assert Attempts(tmp_path / "file" / "attempts").begin("model a")
