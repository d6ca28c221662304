"""A native llama-server with no compiler and no root: Debian's own build, unpacked into the user's cache folder once.

The packages bring their own C library and are started through its loader, so the system is neither changed nor asked
how old it is. `binary()` is all that a caller needs; a machine that is no Debian is told so in one sentence.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from modelyard.core.errors import Unavailable
from modelyard.library import debian
from modelyard.library.home import cache_folder, locked
from modelyard.library.progress import Meter

SUITE = "forky"
PROGRAM = "llama-server"
WANTED = (
    *("llama.cpp-tools", "llama.cpp-tools-extra", "libllama0", "libggml0"),
    *("libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libssl3t64", "libzstd1", "zlib1g"),
)
_PLUGINS = ("gconv", "engines-3", "ossl-modules")  # libraries that are loaded by name, never from the search path


def place(folder: Path | None = None) -> Path:
    """Where the program is once it was fetched: it may not be there yet."""
    return (folder or cache_folder() / "llama-server") / "bin" / PROGRAM


def binary(meter: Meter | None = None, folder: Path | None = None) -> Path:
    """The program, fetched where it is not here yet. A second process that wants it too waits for the first."""
    program = place(folder)
    if program.is_file():
        return program
    meter = meter or Meter()
    home = program.parent.parent
    wait = f"another process is fetching {PROGRAM}: waiting for it"
    try:
        with locked(home / ".lock", lambda: meter.say(wait)):
            if not program.is_file():
                _fetch(home, meter)
    except (OSError, subprocess.SubprocessError) as error:  # no space, no permission
        raise Unavailable(f"{PROGRAM} cannot be put into {home}: {error}") from error
    return program


def _fetch(home: Path, meter: Meter) -> None:
    for left in (home / "root", *home.glob(".fetch-*")):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    kind, address = debian.architecture(), debian.mirror()
    packages = debian.index(address, SUITE, kind, WANTED)
    with tempfile.TemporaryDirectory(dir=home, prefix=".fetch-") as name:
        root = Path(name) / "root"
        root.mkdir()
        with meter.watch(f"{PROGRAM} ({packages[0].version})") as on_bytes:
            debian.unpack(address, packages, root, on_bytes)
        programs = Path(name) / "bin"
        write_starters(root, home / "root", programs)
        root.rename(home / "root")
        programs.rename(home / "bin")  # last: its being there says that all of it is


def write_starters(root: Path, final: Path, programs: Path) -> None:
    """One script a program, for when `root` has become `final`: the unpacked loader with the unpacked libraries."""
    loader = next(root.rglob("ld-linux-*.so.*"), None)
    if loader is None:
        raise debian.unavailable("Debian's C library has no loader where it is expected")
    _link_backends(root, loader.resolve().parent)
    path = ":".join(str(final / folder) for folder in sorted(set(_library_folders(root))))
    programs.mkdir()
    for program in sorted((root / "usr" / "bin").glob("llama*")):
        start = [str(final / loader.relative_to(root)), "--argv0"]
        rest = shlex.join(["--library-path", path, str(final / program.relative_to(root))])
        script = programs / program.name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$0" {rest} "$@"\n')
        script.chmod(0o755)


def _library_folders(root: Path) -> Iterator[Path]:
    for library in root.rglob("*.so*"):
        folder = library.parent.relative_to(root)
        if not any(part.startswith(_PLUGINS) for part in folder.parts):
            yield folder


def _link_backends(root: Path, beside: Path) -> None:
    """ggml looks for its backends beside the running program, and to the system that program is the loader."""
    for backend in root.rglob("libggml-*.so"):
        link = beside / backend.name
        if not link.exists():
            link.symlink_to(os.path.relpath(backend.resolve(), beside))
