"""The command itself, with a stand-in for the agent: what it is given, how it ends, and what becomes of the server."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.commands import DEADLINE, DEMO, MODELYARD, environment, run
from tests.launch.test_server import free_port
from tests.serving import demo, serving


def agent(folder: Path, text: str, name: str = "claude") -> dict[str, str]:
    """An environment in which the agent is this shell script."""
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "MODELYARD_CACHE": str(folder / "cache")}


def test_a_running_server_is_used_and_the_agent_gets_its_variables_arguments_and_exit_code(tmp_path: Path) -> None:
    env = agent(tmp_path, 'echo "$ANTHROPIC_BASE_URL" "${ANTHROPIC_API_KEY-unset}" "$@"; exit 7')
    with serving(demo()) as served:
        done = run(
            "launch", "claude", "--url", served.url, "--", "-p", "a b", cwd=tmp_path, ANTHROPIC_API_KEY="x", **env
        )
        assert httpx.get(served.url + "/health/live").status_code == 200
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"{served.url} unset --model demo --bare -p a b\n"
    assert "bare mode" in done.stderr
    assert (tmp_path / "cache" / "launch" / "claude" / ".claude.json").is_file()


def test_a_server_is_started_where_none_runs_and_ended_with_the_agent(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    env = agent(tmp_path, 'echo "$OPENAI_API_BASE"', "aider")
    done = run("launch", "aider", "--url", url, *DEMO, cwd=tmp_path, **env)
    assert (done.returncode, done.stdout) == (0, f"{url}/v1\n"), done.stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_server_that_cannot_start_is_told_of_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("models = 3\n")
    env = agent(tmp_path, "echo never")
    url = f"http://127.0.0.1:{free_port()}"
    done = run("launch", "claude", "--url", url, "--config", str(tmp_path / "bad.toml"), cwd=tmp_path, **env)
    assert done.returncode == 2
    assert "the server ended before it could answer" in done.stderr
    assert "never" not in done.stdout


def test_signals_are_for_the_agent_and_its_end_by_one_is_told_as_a_shell_does(tmp_path: Path) -> None:
    env = agent(tmp_path, f'echo $$ > "{tmp_path}/pid.new"; mv "{tmp_path}/pid.new" "{tmp_path}/pid"; exec sleep 600')
    with serving(demo()) as served:
        process = subprocess.Popen(
            [*MODELYARD, "launch", "claude", "--url", served.url], cwd=tmp_path, env=environment(**env), text=True
        )
        _until_there(tmp_path / "pid")
        process.send_signal(signal.SIGINT)  # to us alone: the terminal would have sent it to the agent, too
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_printing_shows_the_same_as_shell_lines_and_starts_and_writes_nothing(tmp_path: Path) -> None:
    env = agent(tmp_path, "echo never")
    with serving(demo()) as served:
        done = run("launch", "claude", "--print", "--url", served.url, "--", "--resume", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert f"export ANTHROPIC_BASE_URL={served.url}\n" in done.stdout
    assert done.stdout.endswith("\nclaude --model demo --bare --resume\n")
    assert not (tmp_path / "cache" / "launch").exists()
    gone = run("launch", "claude", "--print", "--url", served.url, cwd=tmp_path, **env)
    assert gone.returncode == 2
    assert "start one with: modelyard serve" in gone.stderr


def test_an_agent_that_is_unknown_or_not_installed_is_one_sentence(tmp_path: Path) -> None:
    assert "there are aider, claude" in run("launch", "emacs", cwd=tmp_path).stderr
    env = agent(tmp_path, "echo never", "other") | {"PATH": str(tmp_path / "bin")}
    done = run("launch", "codex", cwd=tmp_path, **env)
    assert done.returncode == 2
    assert "Codex is not installed; install it with: npm install -g @openai/codex" in done.stderr


def _until_there(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.005)
