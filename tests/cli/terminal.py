"""A command on a pseudo-terminal, for tests of what people type and see."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path
from typing import Self

from tests import cli_process

# The new session has no terminal until a process claims one; only then does Ctrl-C reach it as a signal.
_CLAIM = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A context manager. `text` is what was shown since the last `wait_for`."""

    def __init__(self, *arguments: str, cwd: Path | None = None, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        argv = [sys.executable, "-c", _CLAIM, *cli_process.MODELYARD, *arguments]
        # Nobody answers questions about the position of the cursor here.
        variables = cli_process.environment(TERM="xterm-256color", PROMPT_TOOLKIT_NO_CPR="1", **env)
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, cwd=cwd, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, expected: str) -> None:
        """Wait for this text and drop everything before it."""
        while expected not in self.text:
            readable, _, _ = select.select([self._ours], [], [], cli_process.DEADLINE)
            assert readable, f"it never showed {expected!r}, only {self.text!r}"
            try:
                self.text += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                raise AssertionError(f"it ended without {expected!r}: {self.text!r}") from None
        self.text = self.text.partition(expected)[2]

    def wait(self) -> int:
        """The exit code; `text` is complete then."""
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                break
            self.text += data.decode(errors="replace")
        return self.process.wait(cli_process.DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
