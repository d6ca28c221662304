"""A second machine: a network namespace that is joined to ours by a veth pair, in which workers are started.

It needs the right to create namespaces, which `make test-cluster` gets by `unshare`.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from functools import cache
from pathlib import Path

from modelyard.processes.parent_death import die_with_parent

LOCAL_ADDRESS, REMOTE_ADDRESS = "10.77.0.1", "10.77.0.2"
_DEADLINE_S = 60


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=_DEADLINE_S)


class RemoteMachine:
    """It exists as long as the process in it, which lives as long as this one."""

    def __init__(self) -> None:
        argv = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"
        _run("ip", "link", "add", "cable0", "type", "veth", "peer", "cable1", "netns", str(self._process.pid))
        _run("ip", "address", "add", f"{LOCAL_ADDRESS}/24", "dev", "cable0")
        _run("ip", "link", "set", "cable0", "up")
        _run(*self._inside("ip", "address", "add", f"{REMOTE_ADDRESS}/24", "dev", "cable1"))
        _run(*self._inside("ip", "link", "set", "cable1", "up"))

    def _inside(self, *argv: str) -> list[str]:
        return ["nsenter", "--target", str(self._process.pid), "--net", *argv]

    def start_worker(self, scheduler: str, config: Path) -> subprocess.Popen[bytes]:
        """Run `modelyard worker` there."""
        command = [sys.executable, "-m", "modelyard", "worker", "--scheduler", scheduler, "--config", str(config)]
        return subprocess.Popen(die_with_parent(self._inside(*command, "--listen", f"tcp://{REMOTE_ADDRESS}:*")))

    def disconnect(self) -> None:
        _run("ip", "link", "set", "cable0", "down")

    def reconnect(self) -> None:
        _run("ip", "link", "set", "cable0", "up")

    def close(self) -> None:
        self._process.communicate(timeout=_DEADLINE_S)


@cache
def remote_machine() -> RemoteMachine:
    """One for all tests, closed at exit."""
    machine = RemoteMachine()
    atexit.register(machine.close)
    return machine
