"""Functions that tests run in the pool of child processes."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, sandboxed

LIMITS = Limits(cpu_s=1, wall_s=60, memory=128 << 20)


@sandboxed(LIMITS)
def echo(value: object) -> object:
    return value


@sandboxed(LIMITS)
def refuse() -> None:
    raise InvalidRequest("no such thing", code="no_thing", param="thing")


@sandboxed(LIMITS)
def spin() -> None:
    while True:
        pass


@sandboxed(LIMITS)
def fill_memory() -> int:
    return len(bytearray(1 << 30))


@sandboxed(Limits(wall_s=0.3))
def sleep() -> None:
    time.sleep(600)


@sandboxed(LIMITS)
def sleep_long() -> None:
    time.sleep(600)


@sandboxed(LIMITS)
def abort() -> None:
    print("stage one", flush=True)
    os.abort()


@sandboxed(LIMITS)
def read_file(path: str) -> str:
    return Path(path).read_text()


@sandboxed(LIMITS)
def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port)).close()


@sandboxed(LIMITS)
def environment() -> dict[str, str]:
    return dict(os.environ)


@sandboxed(LIMITS)
def process() -> list[int]:
    """Its own id and that of the process that forked it, when others have begun, too."""
    time.sleep(0.2)
    return [os.getpid(), os.getppid()]


@sandboxed(LIMITS)
def started(purpose: str, files: list[str], library: str) -> str:
    return f"started {purpose and 'it'}{'' if files and library else '?'}"


@sandboxed(LIMITS)
def dying(*_: object) -> None:
    print("stage reading the header", flush=True)
    os.abort()


@sandboxed(LIMITS)
def endless(*_: object) -> None:
    print("stage reading the header", flush=True)
    time.sleep(600)
