"""Installs the coding agents into the cache folder, in the versions that the tests use.

python setup/clients.py               all that are missing (about 3 GiB)
python setup/clients.py claude aider  only these

Agents from npm are installed without their install scripts; aider gets its own virtual environment. Nothing outside
the cache folder is changed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.launch.agents import AGENTS, Agent, get_agent
from setup.installer import install_once, npm_install


def main(arguments: list[str] | None = None) -> int:
    wanted = sys.argv[1:] if arguments is None else arguments
    try:
        for name in wanted or [name for name, agent in AGENTS.items() if agent.version]:
            agent = get_agent(name)
            print(f"{agent.title} {agent.version}: {install(agent, os.environ)}", flush=True)
    except ModelyardError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def install(agent: Agent, env: Mapping[str, str]) -> Path:
    """Install the agent and return its program."""
    folder, program = agent.install_dir(env), agent.pinned_program(env)
    npm = shutil.which("npm", path=env.get("PATH"))
    title = f"{agent.title} {agent.version} from {agent.source}"
    install_once(folder, title, lambda: commands(agent, folder, npm), env, program)
    return program


def commands(agent: Agent, folder: Path, npm: str | None) -> list[list[str]]:
    if not agent.version:
        raise Unavailable(f"no registry has the program of {agent.title}; install it with: {agent.install_command}")
    if agent.source == "PyPI":
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        return [[sys.executable, "-m", "venv", str(folder)], [*pip, agent.requirement]]
    if npm is None:
        raise Unavailable(f"{agent.title} needs npm, which is missing: install Node.js 20 or newer")
    return [npm_install(npm, folder, agent.requirement)]


if __name__ == "__main__":
    sys.exit(main())
