"""Becomes another program that the kernel kills when its parent dies: run as a script, `tether.py PARENT_PID ARGV…`.

The wish survives `exec`, so that any program can be tethered and none has to know. It is a program and not a
`preexec_fn`: Python code between fork and exec can deadlock in a parent that has threads. Linux only; elsewhere it
just becomes the other program, which must watch its parent itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered(argv: list[str]) -> list[str]:
    """The command line that runs `argv` on a tether to the calling process."""
    # -I and -S: nothing of site or the environment is needed here, and it halves the start.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def main(parent: int, argv: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the wish was made: the signal will never come
        raise SystemExit(1)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise SystemExit(f"cannot start {argv[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
