"""Installs the coding agents into the cache folder, in the versions that the tests use.

python setup/clients.py               all that are missing (about 2 GiB)
python setup/clients.py claude aider  only these

Agents from npm are installed without their install scripts; aider gets its own virtual environment. Nothing outside
the cache folder is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.launch.agents import AGENTS, Agent, get_agent
from modelyard.library.cache_dir import file_lock

_MAX_LINES = 15  # of a failed installer's output


def main(arguments: list[str] | None = None) -> int:
    wanted = sys.argv[1:] if arguments is None else arguments
    try:
        for name in wanted or AGENTS:
            agent = get_agent(name)
            print(f"{agent.title} {agent.version}: {install(agent, os.environ)}", flush=True)
    except ModelyardError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def install(agent: Agent, env: Mapping[str, str]) -> Path:
    """Install the agent and return its program. The stamp is written last: without it the folder is incomplete."""
    folder, program = agent.install_dir(env), agent.pinned_program(env)
    stamp = folder / ".installed"
    with file_lock(folder.parent / f".{folder.name}.lock", lambda: _log(f"another process installs {agent.title}")):
        if not (stamp.is_file() and program.is_file()):
            shutil.rmtree(folder, ignore_errors=True)
            _log(f"installing {agent.title} {agent.version} from {agent.source} into {folder} …")
            for command in commands(agent, folder, shutil.which("npm", path=env.get("PATH"))):
                _run(command, env)
            if not program.is_file():
                raise Unavailable(f"{agent.requirement} was installed, but has no program for this system: {program}")
            stamp.touch()
    return program


def commands(agent: Agent, folder: Path, npm: str | None) -> list[list[str]]:
    if agent.source == "PyPI":
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        return [[sys.executable, "-m", "venv", str(folder)], [*pip, agent.requirement]]
    if npm is None:
        raise Unavailable(f"{agent.title} needs npm, which is missing: install Node.js 20 or newer")
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    return [[npm, "install", "--prefix", str(folder), *flags, agent.requirement]]


def _run(command: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        output = "\n".join(done.stdout.splitlines()[-_MAX_LINES:])
        raise Unavailable(f"{' '.join(command)} failed; its last output:\n{output}")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
