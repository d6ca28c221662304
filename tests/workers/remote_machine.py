"""A second machine: a network namespace joined to ours by a cable of its own, in which workers are started.

It takes the right to make namespaces, which `make test-cluster` gets by `unshare`.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from functools import cache
from pathlib import Path

from modelyard.processes.parent_death import die_with_parent

HERE, THERE = "10.77.0.1", "10.77.0.2"
_DEADLINE_S = 60


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=_DEADLINE_S)


class Machine:
    """It is there as long as a process that sits in it, and that one as long as we do."""

    def __init__(self) -> None:
        argv = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
        self._sitter = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._sitter.stdout is not None
        assert self._sitter.stdout.readline() == b"up\n"
        _run("ip", "link", "add", "cable0", "type", "veth", "peer", "cable1", "netns", str(self._sitter.pid))
        _run("ip", "address", "add", f"{HERE}/24", "dev", "cable0")
        _run("ip", "link", "set", "cable0", "up")
        _run(*self._inside("ip", "address", "add", f"{THERE}/24", "dev", "cable1"))
        _run(*self._inside("ip", "link", "set", "cable1", "up"))

    def _inside(self, *argv: str) -> list[str]:
        return ["nsenter", "--target", str(self._sitter.pid), "--net", *argv]

    def worker(self, scheduler: str, config: Path) -> subprocess.Popen[bytes]:
        """`modelyard worker`, as one would start it there."""
        command = [sys.executable, "-m", "modelyard", "worker", "--scheduler", scheduler, "--config", str(config)]
        return subprocess.Popen(die_with_parent(self._inside(*command, "--listen", f"tcp://{THERE}:*")))

    def pull_the_cable(self) -> None:
        _run("ip", "link", "set", "cable0", "down")

    def plug_it_in(self) -> None:
        _run("ip", "link", "set", "cable0", "up")

    def close(self) -> None:
        self._sitter.communicate(timeout=_DEADLINE_S)


@cache
def machine() -> Machine:
    """One for all tests, gone when they are."""
    made = Machine()
    atexit.register(made.close)
    return made
