"""Fetches a native llama-server into the cache folder and prints its path: `python setup/llama_server.py`.

Benchmarks and the tests of the llama_server engine use it. It needs no compiler and no root: Debian's build is unpacked
once. The packages bring their own C library and are started through its loader, so the age of the system does not
matter and nothing is installed. It fails with a message on machines without Debian's tools.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.cache_dir import file_lock
from modelyard.library.llama_server import PROGRAM, binary_path
from modelyard.library.progress import OnBytes, ProgressReporter

SUITE = "forky"
PACKAGES = (
    *("llama.cpp-tools", "llama.cpp-tools-extra", "libllama0", "libggml0"),
    *("libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libssl3t64", "libzstd1", "zlib1g"),
)
_PLUGIN_FOLDERS = ("gconv", "engines-3", "ossl-modules")  # their libraries are loaded by name, not by search path


def fetch_binary(progress: ProgressReporter | None = None, folder: Path | None = None) -> Path:
    """The program; it is downloaded if necessary. Concurrent processes wait for the first."""
    program = binary_path(folder)
    if program.is_file():
        return program
    progress = progress or ProgressReporter()
    target = program.parent.parent
    wait = f"another process is fetching {PROGRAM}: waiting for it"
    try:
        with file_lock(target / ".lock", lambda: progress.write_line(wait)):
            if not program.is_file():
                _fetch(target, progress)
    except (OSError, subprocess.SubprocessError) as error:  # no space, no permission
        raise Unavailable(f"{PROGRAM} cannot be written to {target}: {error}") from error
    return program


def _fetch(target: Path, progress: ProgressReporter) -> None:
    for stale in (target / "root", *target.glob(".fetch-*")):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    architecture, mirror = debian_architecture(), debian_mirror()
    packages = package_index(mirror, SUITE, architecture, PACKAGES)
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as name:
        root, programs = Path(name) / "root", Path(name) / "bin"
        root.mkdir()
        with progress.track(f"{PROGRAM} ({packages[0].version})") as on_bytes:
            unpack_packages(mirror, packages, root, on_bytes)
        write_wrapper_scripts(root, target / "root", programs)
        root.rename(target / "root")
        programs.rename(target / "bin")  # last: its existence means that the installation is complete


def write_wrapper_scripts(root: Path, final: Path, programs: Path) -> None:
    """One script per program, which runs it with the unpacked loader and libraries after `root` is moved to `final`."""
    loader = next(root.rglob("ld-linux-*.so.*"), None)
    if loader is None:
        raise _unavailable("Debian's C library has no loader in the expected place")
    _link_backends(root, loader.resolve().parent)
    library_path = ":".join(str(final / folder) for folder in sorted(set(_library_folders(root))))
    programs.mkdir()
    for program in sorted((root / "usr" / "bin").glob("llama*")):
        start = [str(final / loader.relative_to(root)), "--argv0"]
        rest = shlex.join(["--library-path", library_path, str(final / program.relative_to(root))])
        script = programs / program.name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$0" {rest} "$@"\n')
        script.chmod(0o755)


def _library_folders(root: Path) -> Iterator[Path]:
    for library in root.rglob("*.so*"):
        folder = library.parent.relative_to(root)
        if not any(part.startswith(_PLUGIN_FOLDERS) for part in folder.parts):
            yield folder


def _link_backends(root: Path, folder: Path) -> None:
    """ggml looks for its backends next to the running executable, which is the loader."""
    for backend in root.rglob("libggml-*.so"):
        link = folder / backend.name
        if not link.exists():
            link.symlink_to(os.path.relpath(backend.resolve(), folder))


# --- Debian packages without root -------------------------------------------------------------------------------------

_TIMEOUT_S = 60
_BLOCK = 1 << 16
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class DebianPackage(Struct, frozen=True):
    name: str
    version: str
    path: str
    size: int
    sha256: str


def debian_architecture(machine: str = "") -> str:
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise _unavailable(f"there is none for the processor {machine}")
    return _ARCHITECTURES[machine]


def debian_mirror() -> str:
    """The URL of the mirror that apt uses, with a slash at the end."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise _unavailable("this is not a Debian system: apt-get and dpkg-deb are missing")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return choose_mirror(done.stdout.splitlines())


def choose_mirror(urls: Iterable[str]) -> str:
    """The Debian mirror among apt's repositories (security updates, Ubuntu, vendors)."""
    stripped = (url.rstrip("/") for url in urls)
    mirror = next((u for u in stripped if u.endswith("/debian") and u.startswith(("http://", "https://"))), None)
    if mirror is None:
        raise _unavailable("apt has no Debian mirror configured")
    return mirror + "/"


def package_index(mirror: str, suite: str, architecture: str, names: Collection[str]) -> list[DebianPackage]:
    """The named packages in their current versions."""
    raw = b"".join(_download(f"{mirror}dists/{suite}/main/binary-{architecture}/Packages.xz"))
    found = {}
    for stanza in lzma.decompress(raw).decode().split("\n\n"):
        name = stanza.partition("\n")[0].removeprefix("Package: ")
        if name in names:
            lines = (line for line in stanza.split("\n") if not line.startswith(" ") and ": " in line)
            fields = dict(line.split(": ", 1) for line in lines)
            found[name] = DebianPackage(
                name, fields["Version"], fields["Filename"], int(fields["Size"]), fields["SHA256"]
            )
    if missing := [name for name in names if name not in found]:
        raise _unavailable(f"Debian {suite} has no {', '.join(missing)}")
    return [found[name] for name in names]


def unpack_packages(mirror: str, packages: Collection[DebianPackage], root: Path, on_bytes: OnBytes) -> None:
    """Unpack all packages into one folder, like the root of a system."""
    total, done = sum(package.size for package in packages), 0
    for package in packages:
        with tempfile.NamedTemporaryFile(suffix=".deb", dir=root) as file:
            digest = hashlib.sha256()
            for block in _download(mirror + package.path):
                file.write(block)
                digest.update(block)
                done += len(block)
                on_bytes(done, total)
            file.flush()
            if digest.hexdigest() != package.sha256:
                raise _unavailable(f"the checksum of {package.name} differs from the index; try again")
            subprocess.run(["dpkg-deb", "-x", file.name, str(root)], check=True, timeout=_TIMEOUT_S)


def _download(url: str) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            while block := response.read(_BLOCK):
                yield block
    except OSError as error:
        raise _unavailable(f"{url} could not be read: {error}") from error


def _unavailable(reason: str) -> Unavailable:
    return Unavailable(f"no prebuilt package can be fetched: {reason}", code="fetch_failed")


def main() -> int:
    try:
        print(fetch_binary())
    except ModelyardError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
