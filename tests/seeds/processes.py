"""The program's processes as a user of a seed starts them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.cli_process import DEADLINE, MODELYARD, environment


@contextmanager
def process(command: list[str], folder: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, cwd=folder, env=environment(**env), stderr=subprocess.DEVNULL, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def scheduler(folder: Path, endpoint: str, config: str, **env: str) -> Any:
    """`modelyard scheduler` with its own file: gateways need not have it."""
    folder.mkdir(exist_ok=True)
    (folder / "scheduler.toml").write_text(config)
    return process([*MODELYARD, "scheduler", "--config", "scheduler.toml", "--listen", endpoint], folder, **env)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=DEADLINE).json().get("status") == "healthy"
    except httpx.TransportError:
        return False
