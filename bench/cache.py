"""What a benchmark fetches once and keeps: a wheel by its checksum, and a virtual environment for LiteLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "modelyard"


def venv(folder: Path) -> Path:
    """The Python of a virtual environment in this folder, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    return python


def pip(arguments: Sequence[str], python: Path, what: str) -> None:
    """pip's own progress is shown; a failure says what could not be fetched."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False, timeout=1800).returncode:
        raise SystemExit(f"{what} could not be fetched: pip's own words stand above")


def own_pip() -> Path:
    """A Python that has pip: an environment made by uv has none, LiteLLM's has."""
    if importlib.util.find_spec("pip") is not None:
        return Path(sys.executable)
    return venv(cache_folder() / "bench-litellm")


def wheel(requirement: str, file_name: str, sha256: str) -> Path:
    """The wheel in the cache; downloaded where it is missing, refused where it is not the one we know."""
    folder = cache_folder() / "bench"
    path = folder / file_name
    if not path.exists():
        pip(["download", "--no-deps", "--dest", str(folder), requirement], own_pip(), requirement)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"{path} has the checksum {found}, not {sha256}: delete it and try again")
    return path
