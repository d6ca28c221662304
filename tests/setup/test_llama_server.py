"""The script that builds llama-server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from modelyard.library import llama_server

ROOT = Path(__file__).parent.parent.parent


def run(**env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "setup" / "llama_server.py")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def test_the_path_of_a_working_program_is_printed():
    program = run().stdout.strip()
    assert program == str(llama_server.fetch_binary())
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert "version: " in done.stdout + done.stderr


def test_without_the_tools_of_debian_it_fails_with_a_message(tmp_path: Path):
    done = run(PATH=str(tmp_path), MODELYARD_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "no prebuilt package can be fetched: this is not a Debian system: apt-get and dpkg-deb are missing"
    )
