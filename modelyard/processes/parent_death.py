"""Runs a program that the kernel kills when its parent dies: a script, `parent_death.py PID[+] ARGV…`.

PR_SET_PDEATHSIG survives `exec`, so any program can be run this way. It is a separate program and not a `preexec_fn`:
Python code between fork and exec can deadlock in a parent with threads. Linux only; elsewhere it just runs the program,
which must watch its parent itself.

`PID+` also covers what the program starts: a forked watcher stays in the program's process group and kills the group
when the program dies. If the parent was killed too, no other process is left to do it. Process groups are reliable;
names and environments of processes are not, because some libraries overwrite them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(argv: list[str], *, group: bool = False) -> list[str]:
    """The command line that runs `argv` and kills it when the calling process dies. With `group` everything that it
    starts dies too; then start it in a new session."""
    # -I and -S skip site and the environment, which halves the start-up time.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), f"{os.getpid()}{'+' if group else ''}", *argv]


def main(parent: str, argv: list[str]) -> None:
    if sys.platform == "linux":
        _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != int(parent.rstrip("+")):  # it died before prctl: the signal will never come
        raise SystemExit(1)
    if sys.platform == "linux" and parent.endswith("+") and os.fork() == 0:
        _kill_group_after(os.getpgrp())
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise SystemExit(f"cannot start {argv[0]}: {error.strerror}") from None


def _set_parent_death_signal(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _kill_group_after(program: int) -> None:
    """Never returns. A signal to the whole group also arrives here, so check that the program is really dead."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # a reader of the program's output waits until every holder has closed it
            os.dup2(null, stream)
        _set_parent_death_signal(signal.SIGTERM)
        while os.getppid() == program:
            signal.sigwait({signal.SIGTERM})
        os.killpg(program, signal.SIGKILL)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
