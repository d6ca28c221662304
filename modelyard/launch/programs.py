"""Where an agent's program is: on the user's path, or in our own folder of pinned ones."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from modelyard.core.errors import NotFound
from modelyard.launch.plan import Agent
from modelyard.library.cache_dir import cache_dir

_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def folder(agent: Agent, env: Mapping[str, str] = os.environ) -> Path:
    """Where setup/clients.py puts the version that our tests run."""
    return cache_dir(env) / "clients" / f"{agent.program}-{agent.version}"


def pinned(agent: Agent, env: Mapping[str, str] = os.environ) -> Path:
    return folder(agent, env) / agent.inside.format(platform=native(sys.platform, platform.machine()))


def native(system: str, machine: str) -> str:
    """As packages with a program for each system name them: linux-x64, darwin-arm64."""
    return f"{system}-{_MACHINES.get(machine.lower(), machine.lower())}"


def find(agent: Agent, env: Mapping[str, str] = os.environ) -> Path:
    """The user's own comes first: it is the one that they keep up to date."""
    if found := shutil.which(agent.program, path=env.get("PATH")):
        return Path(found)
    if (ours := pinned(agent, env)).is_file():
        return ours
    raise NotFound(f"{agent.title} is not installed; install it with: {agent.install}")
