"""The script that installs agents."""

from __future__ import annotations

import platform
import stat
import sys
from pathlib import Path

import pytest

from modelyard.core.errors import Unavailable
from modelyard.launch.agents import AGENTS, npm_platform
from setup import clients

AIDER, CLAUDE = AGENTS["aider"], AGENTS["claude"]


def npm(folder: Path, text: str) -> dict[str, str]:
    """An environment whose npm is this script."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "npm"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "MODELYARD_CACHE": str(folder / "cache")}


def test_npm_installs_the_pinned_version_without_scripts(tmp_path: Path) -> None:
    (command,) = clients.commands(CLAUDE, tmp_path, "/usr/bin/npm")
    assert command[:4] == ["/usr/bin/npm", "install", "--prefix", str(tmp_path)]
    assert "--ignore-scripts" in command
    assert command[-1] == f"@anthropic-ai/claude-code@{CLAUDE.version}"


def test_aider_gets_its_own_virtual_environment(tmp_path: Path) -> None:
    make, install = clients.commands(AIDER, tmp_path, None)
    assert make[1:] == ["-m", "venv", str(tmp_path)]
    assert (install[0], install[-1]) == (str(tmp_path / "bin/python"), f"aider-chat=={AIDER.version}")


def test_missing_npm_and_unknown_agents_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match=r"Claude Code needs npm, which is missing: install Node\.js 20"):
        clients.commands(CLAUDE, tmp_path, None)
    assert clients.main(["unknown"]) == 1
    assert "choose one of aider, claude, cline, codex, continue, copilot, crush" in capsys.readouterr().err


def test_an_agent_that_no_registry_has_is_not_installed_and_is_not_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    assert clients.main(["crush"]) == 1
    assert "no registry has the program of Crush; install it with: npm install" in capsys.readouterr().err
    installed: list[str] = []
    monkeypatch.setattr(clients, "install", lambda agent, env: installed.append(agent.title))
    assert clients.main([]) == 0
    assert "goose" in installed
    assert {"Crush", "Zed", "Roo Code"}.isdisjoint(installed)


def test_an_agent_is_installed_once_and_an_incomplete_one_again(tmp_path: Path) -> None:
    inside = CLAUDE.inside.format(platform=npm_platform(sys.platform, platform.machine()))
    made = f'mkdir -p "$3/{Path(inside).parent}"; touch "$3/{inside}"; echo x >> "{tmp_path}/count"'
    env = npm(tmp_path, made)
    program = clients.install(CLAUDE, env)
    assert (program, program.is_file()) == (CLAUDE.pinned_program(env), True)
    clients.install(CLAUDE, env)
    assert (tmp_path / "count").read_text() == "x\n"
    (CLAUDE.install_dir(env) / ".installed").unlink()
    clients.install(CLAUDE, env)
    assert (tmp_path / "count").read_text() == "x\nx\n"


def test_a_failed_installation_shows_the_output_of_npm(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="failed; its last output:\nno network"):
        clients.install(CLAUDE, npm(tmp_path, "echo no network; exit 1"))


def test_a_package_without_a_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="has no program for this system"):
        clients.install(CLAUDE, npm(tmp_path, 'mkdir -p "$3"'))
