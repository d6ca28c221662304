"""Servers under test: started on a free port of 127.0.0.1, watched for CPU time and memory, stopped by process id."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


class Server:
    def __init__(self, process: psutil.Process, port: int) -> None:
        self.process, self.port = process, port

    def cpu_s(self) -> float:
        """User and system time that the process and its children have used so far."""
        return sum(_cpu_s(process) for process in self._tree())

    def rss_mb(self) -> float:
        return sum(process.memory_info().rss for process in self._tree()) / 1e6

    def peak_mb(self) -> float:
        """The most that each process has had resident, summed; as the kernel keeps it."""
        return sum(_peak_kb(process.pid) for process in self._tree()) * 1024 / 1e6

    def _tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _peak_kb(pid: int) -> int:
    told = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in told.splitlines() if line.startswith("VmHWM:")).split()[1])


@contextmanager
def running(
    command: Sequence[str], port: int, ready: str = "", env: Mapping[str, str] | None = None, within_s: float = 120.0
) -> Iterator[Server]:
    """The server until the block ends. It is there when the port answers, or the path `ready` does with 200."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            if not _is_ready(process, port, ready, within_s):
                log.seek(0)
                words = log.read()[-3000:].decode(errors="replace")
                raise SystemExit(f"{' '.join(command)} did not start within {within_s:.0f} s:\n{words}")
            yield Server(psutil.Process(process.pid), port)
        finally:
            stop(process)


def _is_ready(process: subprocess.Popen[bytes], port: int, path: str, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until and process.poll() is None:
        if _answers(port, path):
            return True
        time.sleep(0.05)
    return False


def _answers(port: int, path: str) -> bool:
    try:
        if not path:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        with closing(HTTPConnection("127.0.0.1", port, timeout=2)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status == 200
    except OSError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    for child in psutil.wait_procs(children, timeout=2)[1]:
        child.kill()
