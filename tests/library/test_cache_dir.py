from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from modelyard.library.cache_dir import cache_dir, file_lock


def test_the_cache_folder_follows_the_environment():
    assert cache_dir({"MODELYARD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/modelyard")
    assert cache_dir({}) == Path.home() / ".cache/modelyard"


HOLDER = """
import sys
from pathlib import Path
from modelyard.library.cache_dir import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_of_another_process_is_awaited_and_released_by_its_death(tmp_path: Path):
    calls: list[str] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "x.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        def on_wait() -> None:
            calls.append("waiting")
            holder.kill()

        with file_lock(tmp_path / "x.lock", on_wait):
            assert holder.wait() != 0
    assert calls == ["waiting"]


def test_a_free_lock_is_taken_without_waiting(tmp_path: Path):
    with file_lock(tmp_path / "deep/x.lock", lambda: (_ for _ in ()).throw(AssertionError)):
        pass
    with file_lock(tmp_path / "deep/x.lock"):
        pass
