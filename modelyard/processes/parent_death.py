"""Becomes another program that the kernel kills when its parent dies: run as a script, `tether.py PID[+] ARGV…`.

The wish survives `exec`, so that any program can be tethered and none has to know. It is a program and not a
`preexec_fn`: Python code between fork and exec can deadlock in a parent that has threads. Linux only; elsewhere it
just becomes the other program, which must watch its parent itself.

With `PID+` the program leaves an undertaker in its process group, which ends what is left of the group when the program
dies: where it dies because we did, nobody else is there to do it. Groups hold; names and environments of processes do
not, for some libraries write over both.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(argv: list[str], *, group: bool = False) -> list[str]:
    """The command line that runs `argv` on a tether to the calling process; `group`: with all that it will start, for
    which it must be started in a group of its own."""
    # -I and -S: nothing of site or the environment is needed here, and it halves the start.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), f"{os.getpid()}{'+' if group else ''}", *argv]


def main(parent: str, argv: list[str]) -> None:
    if sys.platform == "linux":
        _wish(signal.SIGKILL)
    if os.getppid() != int(parent.rstrip("+")):  # it died before the wish was made: the signal will never come
        raise SystemExit(1)
    if sys.platform == "linux" and parent.endswith("+") and os.fork() == 0:
        _undertake(os.getpgrp())
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise SystemExit(f"cannot start {argv[0]}: {error.strerror}") from None


def _wish(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _undertake(program: int) -> None:
    """Never returns. A signal to the whole group comes here, too, and is not the program's death."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # whoever reads the program's output waits until nobody holds it
            os.dup2(nothing, stream)
        _wish(signal.SIGTERM)
        while os.getppid() == program:
            signal.sigwait({signal.SIGTERM})
        os.killpg(program, signal.SIGKILL)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
