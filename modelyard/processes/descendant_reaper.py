"""Kills the processes that a library starts on its own, even if this process is killed.

Some libraries leave their helper processes behind, with all their memory, when their parent is killed. The helpers are
marked by a variable in their environment. A watcher (this file as a script, `descendant_reaper.py PARENT_PID MARK`)
waits for the parent's end and kills every marked process. Linux only; elsewhere no marked process is found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

_VARIABLE = "MODELYARD_DESCENDANT"
_WATCHER_EXIT_S = 10.0
_environment_token: SimpleQueue[None] = SimpleQueue()  # held while the mark is in os.environ
_environment_token.put(None)


class DescendantReaper:
    """`mark_children` wraps the call that starts the processes; `kill_all` is idempotent."""

    def __init__(self) -> None:
        self._mark = uuid4().hex
        self._watcher: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<DescendantReaper {self._mark}: {self.pids}>"

    @property
    def pids(self) -> list[int]:
        return find_marked(self._mark)

    def start_watcher(self) -> dict[str, str]:
        """Returns the environment variable that marks a process and all its descendants."""
        argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), self._mark]
        env = {name: value for name, value in os.environ.items() if name != _VARIABLE}  # the watcher is not marked
        null = subprocess.DEVNULL
        self._watcher = subprocess.Popen(  # noqa: S603
            argv, env=env, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
        return {_VARIABLE: self._mark}

    @contextlib.contextmanager
    def mark_children(self) -> Iterator[None]:
        """Mark every process started meanwhile. One at a time, because the environment is process-wide."""
        mark = self.start_watcher()
        _environment_token.get()
        os.environ.update(mark)
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE, None)
            _environment_token.put(None)

    def kill_all(self) -> None:
        kill_marked(self._mark)
        watcher, self._watcher = self._watcher, None
        if watcher is None or watcher.stdin is None:
            return
        watcher.stdin.close()
        try:
            watcher.wait(_WATCHER_EXIT_S)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()


def find_marked(mark: str) -> list[int]:
    proc, wanted = Path("/proc"), f"{_VARIABLE}={mark}".encode()
    if not proc.is_dir():
        return []
    pids = [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if wanted in _environment(pid)]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has exited, or belongs to another user
        return []


def kill_marked(mark: str) -> None:
    """Repeat until none is left: a process may have started another one before it died."""
    for _ in range(10):
        if not (found := find_marked(mark)):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def watch_parent(parent: int, mark: str) -> None:
    """Wait until the parent exits or closes stdin, then kill the marked processes."""
    watched: list[int] = [0]
    with contextlib.suppress(AttributeError, OSError):
        watched.append(os.pidfd_open(parent))
    select.select(watched, [], [])
    kill_marked(mark)


if __name__ == "__main__":
    watch_parent(int(sys.argv[1]), sys.argv[2])
