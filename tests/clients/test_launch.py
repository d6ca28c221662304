"""`modelyard launch` with real agents: it starts a server, and the agent gets a reply."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from modelyard.launch.agents import AGENTS
from tests.cli_process import MODELYARD, ROOT
from tests.clients.agent_bench import DEADLINE, AgentBench
from tests.launch.test_launch import free_port

ONE_QUESTION = {
    "claude": ("-p", "hello"),
    "codex": ("exec", "--skip-git-repo-check", "hello"),
    "opencode": ("run", "hello"),
    "continue": ("-p", "hello"),
    "aider": ("--yes-always", "--no-git", "--no-pretty", "--message", "hello"),
}
CONFIG = """
[models.demo]
backend = "fake"
n_ctx = 65536
script = [{ steps = [{ text = "Hello from the yard." }] }]

[[routes]]
match = "*"
model = "demo"
"""


@pytest.mark.parametrize("name", AGENTS)
def test_launch_starts_a_server_and_the_agent_and_ends_both(name: str, tmp_path: Path) -> None:
    bench = AgentBench(name, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / bench.agent.program).symlink_to(bench.program)
    (tmp_path / "yard.toml").write_text(CONFIG)
    env = bench.environment()
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"MODELYARD_CACHE": str(tmp_path / "cache"), "MODELYARD_URL": f"http://127.0.0.1:{free_port()}"}
    command = [*MODELYARD, "launch", name, "--config", str(tmp_path / "yard.toml"), "--", *ONE_QUESTION[name]]
    done = subprocess.run(
        command, cwd=bench.work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done
    assert "Hello from the yard." in done.stdout, done
    assert not [path for path in (tmp_path / "home").rglob("*") if path.name in FOREIGN], "the user's settings"


FOREIGN = (".claude", ".claude.json", ".codex", ".continue", "opencode.json", ".aider.conf.yml")
