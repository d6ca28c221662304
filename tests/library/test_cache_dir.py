"""Where the library lies, and that two processes take turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from modelyard.library.cache_dir import cache_dir, file_lock


def test_the_folder_is_the_users_own_choice_else_the_systems():
    assert cache_dir({"MODELYARD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/modelyard")
    assert cache_dir({}) == Path.home() / ".cache/modelyard"


HOLDER = """
import sys
from pathlib import Path
from modelyard.library.cache_dir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_that_another_process_holds_is_waited_for_and_freed_by_its_death(tmp_path: Path):
    told: list[str] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "x.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        def leave() -> None:
            told.append("waiting")
            holder.kill()

        with file_lock(tmp_path / "x.lock", leave):
            assert holder.wait() != 0
    assert told == ["waiting"]


def test_a_free_lock_is_taken_without_a_word(tmp_path: Path):
    with file_lock(tmp_path / "deep/x.lock", lambda: (_ for _ in ()).throw(AssertionError)):
        pass
    with file_lock(tmp_path / "deep/x.lock"):
        pass
