"""Where an agent is looked for, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import NotFound
from modelyard.launch import agents, programs

CLAUDE, AIDER = (agents.find(name)[0] for name in ("claude", "aider"))


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def test_the_users_own_comes_before_the_pinned_one(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path / "bin"), "MODELYARD_CACHE": str(tmp_path / "cache")}
    ours = program(programs.pinned(CLAUDE, env))
    assert programs.find(CLAUDE, env) == ours
    theirs = program(tmp_path / "bin" / "claude")
    assert programs.find(CLAUDE, env) == theirs


@pytest.mark.parametrize(
    ("agent", "how"), [(CLAUDE, "npm install -g @anthropic-ai/claude-code"), (AIDER, "pipx install aider-chat")]
)
def test_one_that_is_not_there_is_named_with_the_command_that_installs_it(
    tmp_path: Path, agent: agents.Agent, how: str
) -> None:
    with pytest.raises(NotFound) as caught:
        programs.find(agent, {"PATH": "", "MODELYARD_CACHE": str(tmp_path)})
    assert caught.value.message == f"{agent.title} is not installed; install it with: {how}"


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [("linux", "x86_64", "linux-x64"), ("darwin", "arm64", "darwin-arm64"), ("linux", "aarch64", "linux-arm64")],
)
def test_systems_are_named_as_packages_name_them(system: str, machine: str, name: str) -> None:
    assert programs.native(system, machine) == name
