"""A Ray cluster of three nodes on this machine: a head without CPUs, and two of one CPU each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

HEAD = "127.0.0.1:6379"
_DEADLINE_S = 120


class Nodes:
    def __init__(self) -> None:
        self._start("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        for _ in range(2):
            self.add()

    def add(self) -> None:
        self._start(f"--address={HEAD}", "--num-cpus=1")

    @staticmethod
    def _start(*words: str) -> None:
        _ray("start", *words, "--node-ip-address=127.0.0.1", "--disable-usage-stats")

    @staticmethod
    def kill_under(pid: int) -> None:
        """The node on which this process runs, with all that is on it."""
        for parent in psutil.Process(pid).parents():
            if "raylet" in parent.name():
                for each in (*parent.children(recursive=True), parent):
                    each.kill()
                return
        raise AssertionError(f"{pid} is not under a raylet")

    @staticmethod
    def stop() -> None:
        _ray("stop", "--force", check=False)


def _ray(*words: str, check: bool = True) -> None:
    argv = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words]
    subprocess.run(argv, check=check, timeout=_DEADLINE_S)


@contextmanager
def nodes() -> Iterator[Nodes]:
    """The process that has joined the cluster leaves it before it ends."""
    made = Nodes()
    try:
        yield made
    finally:
        import ray

        ray.shutdown()
        made.stop()
