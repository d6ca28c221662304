"""What a process dies with again and again is set aside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.library.attempts import Attempts, _digest
from tests.cli_process import environment

BEGIN = """
import os, sys
from pathlib import Path
from modelyard.library.attempts import Attempts
os._exit(9 if Attempts(Path(sys.argv[1])).begin(*sys.argv[2:]) else 0)
"""


def die_with(name: str, folder: Path, *identity: str) -> bool:
    """In a process that dies before it has ended. Whether it was allowed to try."""
    command = [sys.executable, "-c", BEGIN, str(folder), name, *identity]
    return subprocess.run(command, env=environment(), check=False).returncode == 9


def test_what_processes_have_died_with_twice_is_set_aside_until_it_works(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "attempts")
    assert attempts.set_aside() == []
    assert die_with("model a", tmp_path / "attempts")
    assert die_with("model a", tmp_path / "attempts", "changed")
    assert attempts.begin("model a")
    assert attempts.set_aside() == [], "it is tried for the second time"
    assert die_with("model a", tmp_path / "attempts")
    assert not die_with("model a", tmp_path / "attempts")
    assert not attempts.begin("model a")
    assert attempts.set_aside() == ["model a"]
    assert attempts.begin("model b")
    assert attempts.begin("model a", "changed"), "another model of the same name"
    attempts.end("model a")
    assert attempts.set_aside() == []
    assert attempts.begin("model a")


def test_a_model_is_not_blamed_for_the_kv_that_was_read_into_it(tmp_path: Path) -> None:
    for process in ("1-5", "2-5"):
        for name in ("kv file", "model a"):
            (tmp_path / f"{_digest(name, '')}.{process}").write_text(name)
    attempts = Attempts(tmp_path)
    assert (attempts.deaths("model a"), attempts.deaths("kv file")) == (0, 2)
    assert attempts.set_aside() == ["kv file"]


def test_processes_that_live_are_no_deaths(tmp_path: Path) -> None:
    for _ in range(5):
        assert Attempts(tmp_path).begin("model a")
    assert die_with("model a", tmp_path)


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
