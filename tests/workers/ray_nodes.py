"""A Ray cluster of three nodes on this machine: a head without CPUs, and two with one CPU each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

HEAD = "127.0.0.1:6379"
_DEADLINE_S = 300  # for a busy machine


class RayNodes:
    def __init__(self) -> None:
        self._start("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        for _ in range(2):
            self.add()

    def add(self) -> None:
        self._start(f"--address={HEAD}", "--num-cpus=1")

    @staticmethod
    def _start(*options: str) -> None:
        _ray("start", *options, "--node-ip-address=127.0.0.1", "--disable-usage-stats")

    @staticmethod
    def kill_node_of(pid: int) -> None:
        """Kill the node that runs this process, with everything on it."""
        for parent in psutil.Process(pid).parents():
            if "raylet" in parent.name():
                for each in (*parent.children(recursive=True), parent):
                    each.kill()
                return
        raise AssertionError(f"{pid} is not under a raylet")

    @staticmethod
    def stop() -> None:
        _ray("stop", "--force", check=False)


def _ray(*arguments: str, check: bool = True) -> None:
    argv = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *arguments]
    wait = {"RAY_raylet_start_wait_time_s": str(_DEADLINE_S)}  # for a node to join
    subprocess.run(argv, check=check, timeout=_DEADLINE_S, env=os.environ | wait)


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """This process leaves the cluster before the cluster stops."""
    try:
        yield RayNodes()
    finally:
        import ray

        ray.shutdown()
        RayNodes.stop()  # also the head of a cluster that did not come up: it has the port
