"""`.ci/clients` runs the tests of the agents that are available, and fails if none is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.cli_process import DEADLINE, ROOT, environment


def run(folder: Path, *, python: str, pytest: str = "exit 0") -> tuple[int, str]:
    """The script in a checkout whose interpreter and pytest are these shell lines."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "clients", folder / ".ci" / "clients")
    for name, text in {"python": python, "pytest": pytest}.items():
        program = folder / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/clients"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.returncode, done.stdout


def test_it_fails_if_no_agent_can_be_installed(tmp_path: Path) -> None:
    code, output = run(tmp_path, python="exit 1")
    assert (code, output.splitlines()[-1]) == (1, "clients: no agent could be installed or started")


def test_it_fails_if_no_agent_can_be_started(tmp_path: Path) -> None:
    code, _ = run(tmp_path, python='case "$*" in *canned*) exit 1;; esac')
    assert code == 1


def test_an_agent_that_cannot_be_installed_is_left_out(tmp_path: Path) -> None:
    code, output = run(tmp_path, python='case "$*" in *codex*) exit 1;; esac', pytest='echo "ran $*"')
    assert code == 0
    ran = next(line for line in output.splitlines() if line.startswith("ran "))
    assert "tests/clients/test_claude.py" in ran
    assert "codex" not in ran


def test_a_failing_agent_fails_it(tmp_path: Path) -> None:
    assert run(tmp_path, python="exit 0", pytest="exit 1")[0] == 1
