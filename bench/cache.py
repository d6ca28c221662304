"""What a benchmark fetches once and keeps: a virtual environment for LiteLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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
