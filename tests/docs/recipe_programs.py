"""Programs that run in the environments of setup/recipes.py."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import httpx

from setup import recipes
from tests.cli_process import environment

DEADLINE = 300.0  # seconds for one program, on a busy machine


def environment_of(name: str, folder: Path) -> dict[str, str]:
    """The framework's own programs first, its switches set, and nothing of the user's."""
    recipe = recipes.RECIPES[name]
    programs = recipes.install(recipe, os.environ) / "bin"
    env = environment(**recipe.switches) | {"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
    return {name: value for name, value in env.items() if name != "PYTHONPATH" and not name.startswith("XDG_")}


def link_modules(name: str, folder: Path) -> None:
    """A program in the folder finds the recipe's packages from npm, if it has any."""
    if recipes.RECIPES[name].npm:
        (folder / "node_modules").symlink_to(recipes.RECIPES[name].folder() / "node_modules")


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"Open WebUI did not start: {log.read_text()[-2000:]}")
