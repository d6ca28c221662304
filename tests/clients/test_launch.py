"""`modelyard launch` with real agents: it starts a server, and the agent gets a reply."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from modelyard.launch.agents import AGENTS
from modelyard.library import default_model
from tests.cli_process import MODELYARD, ROOT
from tests.clients.agent_bench import DEADLINE, AgentBench
from tests.launch.test_launch import free_port
from tests.library.web import serve_hub

ONE_QUESTION = {
    "claude": ("-p", "hello"),
    "codex": ("exec", "--skip-git-repo-check", "hello"),
    "cline": ("say hello",),
    "copilot": ("--allow-all-tools", "-p", "hello"),
    "gemini": ("--prompt", "hello"),  # in a folder that is new to it
    "hermes": ("chat", "-Q", "-q", "hello"),
    "goose": ("run", "--quiet", "--text", "hello"),
    "opencode": ("run", "hello"),
    "pi": ("-p", "hello"),
    "qwen": ("--prompt", "hello"),
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


class User:
    """Someone with an agent on the path, an own cache folder, and no server."""

    def __init__(self, agent: str, folder: Path) -> None:
        bench = AgentBench(agent, folder)
        (folder / "bin").mkdir()
        (folder / "bin" / bench.agent.program).symlink_to(bench.program)
        self._work, self.env = bench.work, bench.environment()
        self.env |= {"PATH": f"{folder / 'bin'}:{self.env['PATH']}", "PYTHONPATH": str(ROOT)}
        self.env |= {"MODELYARD_CACHE": str(folder / "cache"), "MODELYARD_URL": f"http://127.0.0.1:{free_port()}"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MODELYARD, *arguments],
            cwd=self._work,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3 * DEADLINE,  # a real model reads an agent's prompt
        )


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if agent.version])
def test_launch_starts_a_server_and_the_agent_and_ends_both(name: str, tmp_path: Path) -> None:
    (tmp_path / "yard.toml").write_text(CONFIG)
    user = User(name, tmp_path)
    done = user.run("launch", name, "--config", str(tmp_path / "yard.toml"), "--", *ONE_QUESTION[name])
    assert done.returncode == 0, done
    assert "Hello from the yard." in done.stdout, done
    assert not [path for path in (tmp_path / "home").rglob("*") if path.name in FOREIGN], "the user's settings"


FOREIGN = (".claude", ".claude.json", ".cline", ".codex", ".continue", "goose", "opencode.json", ".aider.conf.yml")


def npm_host() -> str:
    registry = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, check=True).stdout
    return urlsplit(registry.strip()).hostname or ""


@pytest.mark.parametrize("name", ["aider", "claude", "continue"])
def test_an_agent_gets_a_reply_from_a_model_right_after_its_pull(name: str, tmp_path: Path) -> None:
    user = User(name, tmp_path)
    (tmp_path / "settings" / "modelyard").mkdir(parents=True)
    (tmp_path / "settings" / "modelyard" / "modelyard.toml").write_text("[decoding]\ntemperature = 0\n")
    with serve_hub() as hub:
        hub.repos["maker/Small-GGUF"] = {"Small-Q4_1.gguf": default_model.fetch().read_bytes()}
        user.env |= {"HF_ENDPOINT": hub.url, "MODELYARD_LIBRARY": "true", "XDG_CONFIG_HOME": str(tmp_path / "settings")}
        user.env |= dict.fromkeys(("NO_PROXY", "no_proxy"), f"127.0.0.1,localhost,{npm_host()}")  # for llama.cpp
        pulled = user.run("pull", "hf.co/maker/Small-GGUF")
    assert pulled.returncode == 0, pulled
    done = user.run("launch", name, "--model", "Small", "--", *ONE_QUESTION[name])
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done
    log = (tmp_path / "cache" / "launch" / "server.log").read_text()
    requests = [line for line in map(json.loads, log.splitlines()) if line.get("method") == "POST"]
    assert requests[-1]["status"] == 200, done
