"""Someone with an empty home: the built wheel, `modelyard start` against a hub of this machine, the first answer, and a
file that Claude Code writes. Run with `-s` it prints how long each step took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelyard.config.library_models import machine_budget
from modelyard.launch.agents import get_agent
from modelyard.library import catalogue, default_model
from tests.cli_process import ROOT
from tests.clients.agent_bench import DEADLINE, call_step, rule, text_step
from tests.launch.test_launch import free_port
from tests.library.web import serve_hub

pytestmark = pytest.mark.clients
_FOREIGN = ("MODELYARD_", "XDG_", "PYTHON", "HF_", "VIRTUAL_ENV")


class Newcomer:
    def __init__(self, folder: Path) -> None:
        self.home, self.work, self.times = folder / "home", folder / "work", dict[str, float]()
        for made in (self.home, self.work, folder / "bin"):
            made.mkdir()
        claude = get_agent("claude")
        (folder / "bin" / claude.program).symlink_to(claude.pinned_program())
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.env |= {"HOME": str(self.home), "PATH": f"{folder / 'venv' / 'bin'}:{folder / 'bin'}:{os.environ['PATH']}"}
        self.env |= {"MODELYARD_HTTP__PORT": str(free_port()), "IS_SANDBOX": "1"}

    def does(self, step: str, *command: str, **env: str) -> str:
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.work,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3 * DEADLINE,
        )
        assert done.returncode == 0, (step, done.stdout[-2000:], done.stderr[-2000:])
        self.times[step] = time.monotonic() - began
        return done.stdout


def test_a_newcomer_gets_an_answer_and_a_file_by_claude_code(tmp_path: Path) -> None:
    user, suited = Newcomer(tmp_path), catalogue.suggest("chat", machine_budget())
    assert suited is not None
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    user.does("make a venv", sys.executable, "-m", "venv", str(tmp_path / "venv"))
    user.does("pip install", "pip", "install", "--quiet", str(wheel))
    with serve_hub() as hub:
        files = {f"{suited.repo.partition('/')[2]}-Q4_K_M.gguf": default_model.fetch().read_bytes()}
        hub.repos[suited.repo] = files
        user.env |= {"HF_ENDPOINT": hub.url}
        said = user.does("modelyard start", "modelyard", "start", "--yes")
        assert suited.name in said
        answer = user.does(
            "the first answer", "modelyard", "run", suited.name, "Hello", "--set", "max_tokens=8", "--json"
        )
        assert json.loads(answer)["content"]
        user.does("modelyard stop", "modelyard", "stop", "--server")
    note = user.work / "note.txt"
    steps = [
        rule(text_step("It is written."), result="(?i)created|written"),
        rule(call_step("Write", file_path=str(note), content="forty-two\n"), when="write a note"),
    ]
    model = {"backend": "fake", "n_ctx": 131072, "script": steps}
    config = {"models": {"demo": model}, "routes": [{"match": "*", "model": "demo"}]}
    (tmp_path / "yard.json").write_text(json.dumps(config))
    launch = ("modelyard", "launch", "claude", "--config", str(tmp_path / "yard.json"), "--keep-alive", "0", "--")
    allowed = "--dangerously-skip-permissions"
    url = f"http://127.0.0.1:{free_port()}"
    user.does("Claude Code writes a file", *launch, "-p", "write a note", allowed, MODELYARD_URL=url)
    assert note.read_text() == "forty-two\n"
    print("\n" + "\n".join(f"{seconds:6.1f} s  {step}" for step, seconds in user.times.items()))
