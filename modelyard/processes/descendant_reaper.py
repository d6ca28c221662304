"""Processes that a library starts behind our back: told by a mark in their environment, and none outlives us.

Some libraries leave their helpers behind when their parent is killed, with all the memory they hold. A keeper (this
file run as a script, `brood.py PARENT_PID MARK`) waits for the parent's end, whatever brings it, and ends what bears
the mark. Linux only; elsewhere nothing is found.
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

_NAME = "MODELYARD_BROOD"
_END_S = 10.0
_turn: SimpleQueue[None] = SimpleQueue()
_turn.put(None)


class DescendantReaper:
    """`hatching` wraps the call that starts them; `end` is idempotent."""

    def __init__(self) -> None:
        self._mark = uuid4().hex
        self._keeper: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Brood {self._mark}: {find_marked(self._mark)}>"

    @property
    def pids(self) -> list[int]:
        return find_marked(self._mark)

    def guarded(self) -> dict[str, str]:
        """Starts the keeper. Whatever has this in its environment is of the brood, and all that it starts."""
        argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), self._mark]
        env = {name: value for name, value in os.environ.items() if name != _NAME}  # it is nobody's
        quiet = subprocess.DEVNULL
        self._keeper = subprocess.Popen(  # noqa: S603
            argv, env=env, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        return {_NAME: self._mark}

    @contextlib.contextmanager
    def hatching(self) -> Iterator[None]:
        """Whatever is started meanwhile is of the brood. One at a time: the environment is the whole process's."""
        told = self.guarded()
        _turn.get()
        os.environ.update(told)
        try:
            yield
        finally:
            os.environ.pop(_NAME, None)
            _turn.put(None)

    def end(self) -> None:
        kill_marked(self._mark)
        keeper, self._keeper = self._keeper, None
        if keeper is None or keeper.stdin is None:
            return
        keeper.stdin.close()
        try:
            keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()


def find_marked(mark: str) -> list[int]:
    wanted = f"{_NAME}={mark}".encode()
    return [pid for pid in _all() if wanted in _environment(pid)]


def _all() -> list[int]:
    proc = Path("/proc")
    return [int(each.name) for each in proc.iterdir() if each.name.isdecimal()] if proc.is_dir() else []


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has gone, or is somebody else's
        return []


def kill_marked(mark: str) -> None:
    """Until none is left: one that is being ended may have started another."""
    for _ in range(10):
        if not (found := find_marked(mark)):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def watch_parent(parent: int, mark: str) -> None:
    """Waits for the parent's end, or its word that it is not needed any more."""
    watched: list[int] = [0]
    with contextlib.suppress(AttributeError, OSError):
        watched.append(os.pidfd_open(parent))
    select.select(watched, [], [])
    kill_marked(mark)


if __name__ == "__main__":
    watch_parent(int(sys.argv[1]), sys.argv[2])
