"""Fills a folder of the cache by running installers: once, and again if it is incomplete."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from modelyard.core.errors import Unavailable
from modelyard.library.cache_dir import file_lock

_MAX_LINES = 15  # of a failed installer's output


def install_once(
    folder: Path,
    title: str,
    commands: Callable[[], Iterable[list[str]]],
    env: Mapping[str, str],
    program: Path | None = None,
) -> None:
    """Run `commands` unless the folder is complete, and has its `program` if one is named. The stamp is written last:
    without it the folder is incomplete."""
    stamp = folder / ".installed"
    with file_lock(folder.parent / f".{folder.name}.lock", lambda: log(f"another process installs {title}")):
        if stamp.is_file() and (program is None or program.is_file()):
            return
        shutil.rmtree(folder, ignore_errors=True)
        log(f"installing {title} into {folder} …")
        for command in commands():
            _run(command, env)
        if program is not None and not program.is_file():
            raise Unavailable(f"{title} was installed, but has no program for this system: {program}")
        stamp.touch()


def npm_install(npm: str, folder: Path, *packages: str) -> list[str]:
    """Without the packages' own install scripts."""
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    return [npm, "install", "--prefix", str(folder), *flags, *packages]


def _run(command: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        output = "\n".join(done.stdout.splitlines()[-_MAX_LINES:])
        raise Unavailable(f"{' '.join(command)} failed; its last output:\n{output}")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
